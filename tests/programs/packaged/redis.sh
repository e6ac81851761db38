version() { debian redis-server; }
serve() {
  exec redis-server --bind 127.0.0.1 --port "$port" --dir "$dir" --save '' --appendonly no
}
commands() { redis-cli -p "$port" info stats | tr -d '\r' | sed -n 's/^total_commands_processed://p'; }
load() {
  redis-benchmark -p "$port" -c 8 -t get,set -n 1000000000 -r 1000 -q >/dev/null 2>&1 &
  bench=$!
  trap 'kill $bench 2>/dev/null' EXIT
  before=$(commands)
  begin
  fetch redis
  rate "($(commands) - $before)" commands/s
  echo ok
}
