serve() {
  nginx_behind
  exec varnishd -F -n "$dir/varnish" -a "127.0.0.1:$port" -b "127.0.0.1:$back" -s malloc,64m
}
stop() { until_pid "$dir/nginx.pid"; }
