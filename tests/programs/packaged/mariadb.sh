# As its own user; what it says over TCP is what it says over its Unix socket.
version() { debian mariadb-server; }
serve() {
  mkdir "$dir/my"
  chown mysql "$dir/my"
  mariadb-install-db --no-defaults --user=mysql --datadir="$dir/my/data" --auth-root-authentication-method=normal \
    --skip-test-db >/dev/null 2>&1
  exec mariadbd --no-defaults --user=mysql --datadir="$dir/my/data" --socket="$dir/my/socket" --bind-address=127.0.0.1 \
    --port="$port" --pid-file="$dir/my/pid" --skip-name-resolve
}
query="select seq, md5(seq), repeat(md5(seq), 30) from seq_1_to_25000"
questions() {
  mariadb --no-defaults -u root -S "$dir/my/socket" -Ne "show global status like 'Questions'" | awk '{ print $2 }'
}
load() {
  until questions >/dev/null 2>&1; do sleep 0.1; done
  mariadb --no-defaults -u root -S "$dir/my/socket" -N -e "create database if not exists d; $query" d 2>/dev/null >"$dir/my.unix" ||
    { mariadb --no-defaults -u root -S "$dir/my/socket" -e "create database d"
      mariadb --no-defaults -u root -S "$dir/my/socket" -N -e "$query" d >"$dir/my.unix"; }
  [ "$(wc -l <"$dir/my.unix")" = 25000 ]
  mariadb-slap --no-defaults -u root -h 127.0.0.1 -P "$port" -c 8 --create-schema=d --iterations=1 \
    --number-of-queries=1000000000 --query='select repeat(1, 200)' >"$dir/slap" 2>&1 &
  bench=$!
  trap 'kill $bench 2>/dev/null' EXIT
  before=$(questions)
  begin
  while [ ! -e "$dir/stop" ]; do echo "$query;"; sleep 0.05; done |
    mariadb --no-defaults -u root -h 127.0.0.1 -P "$port" -N -n -q d >"$dir/my.tcp"
  rate "($(questions) - $before)" queries/s
  awk -v w="$dir/my.unix" 'BEGIN { while ((getline l < w) > 0) want[n++] = l }
    $0 != want[i++ % n] { bad = 1; exit } END { exit bad || i % n || !i }' "$dir/my.tcp"
  echo ok
}
