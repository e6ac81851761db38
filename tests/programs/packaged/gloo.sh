# PyTorch's gloo backend, two processes of one group.
version() { debian python3-torch; }
serve() { exec /usr/bin/python3.11 "$here/packaged/group.py" 0 "$port" "$dir"; }
load() { exec /usr/bin/python3.11 "$here/packaged/group.py" 1 "$port" "$dir"; }
