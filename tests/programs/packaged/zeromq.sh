version() { debian libzmq5; }
serve() { exec /usr/bin/python3.11 "$here/packaged/messages.py" serve "$port" "$dir"; }
load() { exec /usr/bin/python3.11 "$here/packaged/messages.py" load "$port" "$dir"; }
