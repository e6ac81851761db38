#!/bin/sh
# Programs as Debian or their makers package them, with the users, root directories and process models
# they have there. One file each in `packaged/`; PROGRAM-VARIANT is in that of PROGRAM.
#
#   packaged.sh PROGRAM serve DIR PORT BACK   starts it, in the foreground if it can be; as root; what does
#                                             not listen on PORT makes DIR/served
#   packaged.sh PROGRAM load DIR PORT BACK    traffic from when it makes DIR/begun until DIR/stop exists;
#                                             compares what it got, prints "rate NUMBER UNIT" and "ok"
#   packaged.sh PROGRAM stop DIR PORT BACK    ends what does not end with its process group
#   packaged.sh PROGRAM version
#
# BACK: a port for what some programs have behind them.
#
# Whoever calls decides what they run under: the environment is passed on as it is. DIR must be one that
# every user may enter; DIR/www has the files `big` and `small`.
set -eu
program=$1 action=$2 dir=${3:-} port=${4:-0} back=${5:-0}
here=$(dirname "$(readlink -f "$0")")
target=${CARGO_TARGET_DIR:-$here/../../target}

debian() { # version of a package
  dpkg-query -W -f '${Version}' "$1"
}

now() { # milliseconds
  echo $(($(date +%s%N) / 1000000))
}

begin() {
  began=$(now)
  : >"$dir/begun"
}

rate() { # what was done since `begin`, unit
  echo "rate $(awk "BEGIN { print $1 * 1000 / ($(now) - $began) }") $2"
}

until_pid() { # ends what wrote its number there
  [ ! -s "$1" ] || kill $(head -n 1 "$1") 2>/dev/null || true
}

fetch() { # how; lasting connections, until DIR/stop exists
  /usr/bin/python3.11 "$here/packaged/fetch.py" "$1" "$port" "$dir"
}

http_load() {
  for i in small big; do # a connection that is soon gone
    curl -sS --fail -o "$dir/got" "http://127.0.0.1:$port/$i"
    cmp "$dir/got" "$dir/www/$i"
  done
  wrk -t 1 -c 8 -d 600s "http://127.0.0.1:$port/small" >"$dir/wrk.out" 2>&1 &
  wrk=$!
  trap 'kill $wrk 2>/dev/null' EXIT
  begin
  fetch http
  kill -INT $wrk
  trap - EXIT
  wait $wrk || true
  ! grep -E 'Socket errors|Non-2xx' "$dir/wrk.out" || exit 1
  sed -n 's/^Requests.sec: */rate /p' "$dir/wrk.out" | sed 's,$, requests/s,'
  echo ok
}

nginx_conf() { # port
  cat >"$dir/nginx.conf" <<EOF
user www-data; worker_processes 2; pid $dir/nginx.pid; error_log $dir/nginx.log;
events { worker_connections 512; }
http {
  access_log off; sendfile on; keepalive_requests 1000000000;
  client_body_temp_path $dir/t1; proxy_temp_path $dir/t2; fastcgi_temp_path $dir/t3;
  uwsgi_temp_path $dir/t4; scgi_temp_path $dir/t5;
  server { listen 127.0.0.1:$1; root $dir/www; }
}
EOF
}

nginx_behind() { # of other servers, under the same
  nginx_conf "$back"
  nginx -c "$dir/nginx.conf" -e "$dir/nginx.log"
}

# What most have in common; a program's file says what is different.
load() { http_load; }
stop() { :; }
version() { debian "$program"; }

. "$here/packaged/${program%%-*}.sh"
"$action"
