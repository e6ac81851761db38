# With a root directory and a user of its own, in the background; in front of an nginx.
serve() {
  nginx_behind
  mkdir -p "$dir/jail"
  cat >"$dir/haproxy.cfg" <<EOF
global
  chroot $dir/jail
  user haproxy
  group haproxy
defaults
  mode http
  timeout connect 5s
  timeout client 60s
  timeout server 60s
frontend front
  bind 127.0.0.1:$port
  default_backend back
backend back
  server one 127.0.0.1:$back
EOF
  haproxy -D -f "$dir/haproxy.cfg" -p "$dir/haproxy.pid"
  exec sleep 600
}
stop() {
  until_pid "$dir/haproxy.pid"
  until_pid "$dir/nginx.pid"
}
