serve() { exec memcached -u memcache -l 127.0.0.1 -p "$port" -t 2 -m 256 -I 8m; }
load() {
  begin
  fetch memcached
  rate "$(cat "$dir/rounds")" rounds/s
  echo ok
}
