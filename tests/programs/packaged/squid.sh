# In front of an nginx. As packaged it executes its worker with other effective than real users: the
# dynamic loader ignores LD_PRELOAD (secure execution). squid-single: without a worker of its own (-N).
version() { debian squid; }
serve() {
  nginx_behind
  mkdir -p "$dir/squid"
  chown proxy:proxy "$dir/squid"
  cat >"$dir/squid.conf" <<EOF
http_port 127.0.0.1:$port accel defaultsite=localhost no-vhost
cache_peer 127.0.0.1 parent $back 0 no-query originserver
acl all_src src 127.0.0.1
http_access allow all_src
cache_effective_user proxy
pid_filename $dir/squid/pid
cache_log $dir/squid/cache.log
access_log none
coredump_dir $dir/squid
pinger_enable off
EOF
  case $program in
    squid-single) exec squid -N -sYC -f "$dir/squid.conf" ;;
  esac
  exec squid --foreground -sYC -f "$dir/squid.conf"
}
stop() { until_pid "$dir/nginx.pid"; }
