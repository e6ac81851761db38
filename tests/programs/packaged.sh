#!/bin/sh
# Programs as Debian packages them, with the users, root directories and process models they have there.
#
#   packaged.sh PROGRAM serve DIR PORT BACK   starts it, in the foreground if it can be; as root
#   packaged.sh PROGRAM load DIR PORT         traffic until DIR/stop exists; then compares what it got
#   packaged.sh PROGRAM stop DIR              ends what does not end with its process group
#
# BACK: a port for what some programs have behind them.
#
# Whoever calls decides what they run under: the environment is passed on as it is. DIR must be one that
# every user may enter; DIR/www has the files `big` and `small`.
set -eu
program=$1 action=$2 dir=$3 port=${4:-0} back=${5:-0}

http_load() {
  trap 'kill $wrk 2>/dev/null' EXIT
  wrk -t 1 -c 8 -d 60s "http://127.0.0.1:$port/small" >"$dir/wrk.out" 2>&1 &
  wrk=$!
  while [ ! -e "$dir/stop" ]; do
    set --
    for i in 1 2 3 4 5 6 7 8 9 10; do
      set -- "$@" -o "$dir/got.small" "http://127.0.0.1:$port/small" -o "$dir/got.big" "http://127.0.0.1:$port/big"
    done
    curl -sS --fail "$@"
    cmp "$dir/got.small" "$dir/www/small"
    cmp "$dir/got.big" "$dir/www/big"
  done
  echo ok
}

until_pid() { # ends what wrote its number there
  [ ! -s "$1" ] || kill $(cat "$1") 2>/dev/null || true
}

nginx_conf() { # user, port
  cat >"$dir/nginx.conf" <<EOF
user $1; worker_processes 2; pid $dir/nginx.pid; error_log $dir/nginx.log;
events { worker_connections 512; }
http {
  access_log off; sendfile on; keepalive_requests 1000000000;
  client_body_temp_path $dir/t1; proxy_temp_path $dir/t2; fastcgi_temp_path $dir/t3;
  uwsgi_temp_path $dir/t4; scgi_temp_path $dir/t5;
  server { listen 127.0.0.1:$2; root $dir/www; }
}
EOF
}

apache_conf() { # module of the process model
  cat >"$dir/apache.conf" <<EOF
ServerRoot /etc/apache2
ServerName localhost
PidFile $dir/apache.pid
ErrorLog $dir/apache.log
Listen 127.0.0.1:$port
User www-data
Group www-data
LoadModule mpm_$1_module /usr/lib/apache2/modules/mod_mpm_$1.so
LoadModule authz_core_module /usr/lib/apache2/modules/mod_authz_core.so
DocumentRoot $dir/www
KeepAlive On
MaxKeepAliveRequests 0
StartServers 2
<Directory $dir/www>
  Require all granted
</Directory>
EOF
}

case $program.$action in
  nginx.serve)
    nginx_conf www-data "$port"
    exec nginx -c "$dir/nginx.conf" -e "$dir/nginx.log" -g 'daemon off;'
    ;;
  haproxy.serve)
    # In front of an nginx of its own, both under the same.
    nginx_conf www-data "$back"
    nginx -c "$dir/nginx.conf" -e "$dir/nginx.log"
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
    ;;
  haproxy.stop)
    until_pid "$dir/haproxy.pid"
    until_pid "$dir/nginx.pid"
    ;;
  apache-event.serve)
    apache_conf event
    exec apache2 -d /etc/apache2 -f "$dir/apache.conf" -DFOREGROUND
    ;;
  apache-prefork.serve)
    apache_conf prefork
    exec apache2 -d /etc/apache2 -f "$dir/apache.conf" -DFOREGROUND
    ;;
  gunicorn.serve)
    cat >"$dir/app.py" <<EOF
import os
def app(environ, start_response):
    with open("$dir/www" + environ["PATH_INFO"], "rb") as f:
        body = f.read()
    start_response("200 OK", [("Content-Length", str(len(body)))])
    return [body]
EOF
    exec gunicorn --chdir "$dir" -u www-data -g www-data -w 2 -k gthread --keep-alive 60 \
      -b "127.0.0.1:$port" app:app
    ;;
  varnish.serve)
    nginx_conf www-data "$back"
    nginx -c "$dir/nginx.conf" -e "$dir/nginx.log"
    exec varnishd -F -n "$dir/varnish" -a "127.0.0.1:$port" -b "127.0.0.1:$back" -s malloc,64m
    ;;
  squid.serve)
    nginx_conf www-data "$back"
    nginx -c "$dir/nginx.conf" -e "$dir/nginx.log"
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
EOF
    exec squid --foreground -sYC -f "$dir/squid.conf"
    ;;
  varnish.stop | squid.stop)
    until_pid "$dir/nginx.pid"
    ;;
  *.stop) ;;
  *.load) http_load ;;
  *)
    echo "packaged.sh: no $program.$action" >&2
    exit 2
    ;;
esac
