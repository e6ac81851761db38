# As its own user, with connections over TCP; what it says there is what it says over its Unix socket.
bin=$(ls -d /usr/lib/postgresql/*/bin | tail -n 1)
version() { debian "$(basename "$(dirname "$bin")" | sed 's/^/postgresql-/')"; }
as_postgres() { setpriv --reuid postgres --regid postgres --clear-groups "$@"; }
serve() {
  mkdir "$dir/pg"
  chown postgres "$dir/pg"
  as_postgres "$bin/initdb" -D "$dir/pg/data" -A trust --no-sync >/dev/null
  as_postgres "$bin/pg_ctl" -D "$dir/pg/data" -w -l "$dir/pg/log" -o "-k $dir/pg -p $back -c listen_addresses=" start >/dev/null
  as_postgres "$bin/pgbench" -h "$dir/pg" -p "$back" -i -q -s 2 postgres >/dev/null 2>&1
  as_postgres "$bin/pg_ctl" -D "$dir/pg/data" -w stop >/dev/null
  cd /
  exec setpriv --reuid postgres --regid postgres --clear-groups \
    "$bin/postgres" -D "$dir/pg/data" -k "$dir/pg" -p "$port" -c listen_addresses=127.0.0.1 -c fsync=off
}
query="select md5(aid::text || g), repeat(md5(g::text), 30) from pgbench_accounts, generate_series(1, 5) g where aid <= 5000 order by aid, g"
load() {
  until "$bin/pg_isready" -q -h 127.0.0.1 -p "$port"; do sleep 0.1; done
  "$bin/psql" -U postgres -h "$dir/pg" -p "$port" -Atc "$query" postgres >"$dir/pg.unix"
  [ "$(wc -l <"$dir/pg.unix")" = 25000 ]
  "$bin/pgbench" -U postgres -h 127.0.0.1 -p "$port" -S -M prepared -c 8 -j 2 -T 600 -P 1 postgres >"$dir/pgbench" 2>&1 &
  bench=$!
  trap 'kill $bench 2>/dev/null' EXIT
  begin
  # One session that asks again and again.
  while [ ! -e "$dir/stop" ]; do echo "$query;"; sleep 0.05; done |
    "$bin/psql" -U postgres -h 127.0.0.1 -p "$port" -At postgres >"$dir/pg.tcp"
  awk -v w="$dir/pg.unix" 'BEGIN { while ((getline l < w) > 0) want[n++] = l }
    $0 != want[i++ % n] { bad = 1; exit } END { exit bad || i % n || !i }' "$dir/pg.tcp"
  awk '/^progress/ { t += $4; n++ } END { print "rate", t / n, "transactions/s" }' "$dir/pgbench"
  echo ok
}
