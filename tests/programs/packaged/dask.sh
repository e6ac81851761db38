# Scheduler, two workers with nannies, a client.
version() { debian python3-distributed; }
export DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT=60s
serve() {
  cd "$dir"
  for w in 1 2; do
    /usr/bin/python3.11 -m distributed.cli.dask_worker "tcp://127.0.0.1:$port" --host 127.0.0.1 --nthreads 1 \
      --no-dashboard --local-directory "$dir/worker$w" &
  done
  exec /usr/bin/python3.11 -m distributed.cli.dask_scheduler --host 127.0.0.1 --port "$port" --no-dashboard
}
load() { exec /usr/bin/python3.11 "$here/packaged/cluster.py" "$port" "$dir"; }
