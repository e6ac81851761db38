# The daemon, as nobody in a root directory of its own; rsync-ssh: over sshd.
version() { debian rsync; }
files() { # several sizes, a lot in all
  mkdir "$dir/files"
  for i in 1 2 3; do head -c 80000000 /dev/urandom >"$dir/files/$i"; done
  for i in $(seq 200); do head -c "$((i * 37))" "$dir/www/big" >"$dir/files/small$i"; done
}
serve() {
  files
  cat >"$dir/rsyncd.conf" <<EOF
uid = nobody
gid = nogroup
use chroot = yes
[files]
path = $dir/files
EOF
  exec rsync --daemon --no-detach --address 127.0.0.1 --port "$port" --config "$dir/rsyncd.conf"
}
load() {
  begin
  moved=0
  while [ ! -e "$dir/stop" ]; do
    rm -rf "$dir/got"
    rsync -a "rsync://127.0.0.1:$port/files/" "$dir/got"
    diff -r "$dir/files" "$dir/got"
    moved=$((moved + 240))
  done
  rate "$moved" MB/s
  echo ok
}
