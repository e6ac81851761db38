"""Cases of handovers: servers that pass connections between processes of their own, or start programs beside them."""
import glob
import os
import shutil
import signal
import subprocess
import time

from handovers_run import BARE, PATIENCE, Wrong, compare, echoes, free_port, repeated, requests, until
from handovers_servers import seconds

POSTGRES = ["setpriv", "--reuid", "postgres", "--regid", "postgres", "--clear-groups"]

BOUNCER = """[databases]
postgres = host=127.0.0.1 port={pg} dbname=postgres user=postgres
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir = {dir}
auth_type = any
pool_mode = {mode}
logfile = {dir}/pgbouncer.log
pidfile = {dir}/pgbouncer.pid
admin_users = postgres
ignore_startup_parameters = extra_float_digits
server_idle_timeout = 600
"""


def start_postgres(run, port, *settings):
    """Returns the directory of its programs."""
    bin = sorted(glob.glob("/usr/lib/postgresql/*/bin"))[-1]
    os.mkdir(run.path("pg"))
    shutil.chown(run.path("pg"), "postgres")
    unix = dict(env=BARE, stdout=subprocess.DEVNULL)
    subprocess.run([*POSTGRES, bin + "/initdb", "-D", run.path("pg/data"), "-A", "trust", "--no-sync", "--no-locale"],
                   check=True, cwd="/", **unix)
    with open(run.path("said"), "ab") as said:
        run.spawn(*POSTGRES, bin + "/postgres", "-D", run.path("pg/data"), "-k", run.path("pg"), "-p", port,
                  *[w for s in ("listen_addresses=127.0.0.1", "fsync=off", *settings) for w in ("-c", s)], cwd="/",
                  stdin=subprocess.DEVNULL, stdout=said, stderr=said)
    ready = [bin + "/pg_isready", "-h", run.path("pg"), "-p", str(port)]
    until("it answers", PATIENCE, lambda: not subprocess.run(ready, **unix).returncode)
    return bin


def session(run, n, psql, rest):
    p = run.spawn(*psql, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    end = time.monotonic() + rest
    k = 0
    while time.monotonic() < end:
        k += 1
        size = 1 + (k * 7919) % 60000
        with run.request(size):
            p.stdin.write(b"select repeat('%d', %d);\n" % (n, size))
            p.stdin.flush()
            got = p.stdout.read(size * len(str(n)) + 1)
            compare(got, str(n).encode() * size + b"\n")
        time.sleep(0.02 * n)
    p.stdin.close()
    if p.wait(PATIENCE):
        raise Wrong("psql ended with %s" % p.returncode)


def pgbouncer(run, mode):
    pg = free_port()
    bin = start_postgres(run, pg)
    os.chmod(run.dir, 0o777)
    conf = run.file("bouncer.ini", BOUNCER.format(pg=pg, port=run.port, dir=run.dir, mode=mode))
    run.start(*POSTGRES, "pgbouncer", conf, cwd="/")
    psql = [bin + "/psql", "-h", "127.0.0.1", "-p", str(run.port), "-U", "postgres", "-XAtq", "-v", "ON_ERROR_STOP=1",
            "postgres"]
    for n in range(5):
        run.client(session, n, psql, 7)
    for _ in range(3):
        time.sleep(1.5)
        old = run.read("pgbouncer.pid")
        with open(run.path("said"), "ab") as said:
            run.spawn(*POSTGRES, "pgbouncer", "-R", conf, cwd="/", stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        until("the new one has taken over", PATIENCE, lambda: os.path.exists(run.path("pgbouncer.pid")) and run.read(
            "pgbouncer.pid") not in ("", old))
    run.join()


PUMA = """
require 'socket'
app { |env|
  n = env['QUERY_STRING'].to_i
  `true` if n.modulo(10).zero?
  line = "#{n}\\n"
  body = (line * (65536 / line.size + 1))[0, 65536]
  [200, {'Content-Type' => 'text/plain', 'Content-Length' => body.size.to_s}, [body]]
}
bind 'tcp://127.0.0.1:%d'
workers %d
threads 2, 4
"""


def puma(run, workers):
    run.start("/usr/bin/puma", "-C", run.file("puma.rb", PUMA % (run.port, workers)), "--dir", run.dir)
    for n in range(4):
        run.client(requests, n, "/", lambda k: repeated(k, 65536), seconds(5), True, 0.01)
    time.sleep(2)
    run.programs[-1].send_signal(signal.SIGUSR2)
    run.join()


UWSGI_APP = """
import os
def application(env, start):
    n = int(env["QUERY_STRING"] or 0)
    if n % 10 == 0:
        os.system("true")
    line = b"%d\\n" % n
    body = (line * (65536 // len(line) + 1))[:65536]
    start("200 OK", [("Content-Length", str(len(body)))])
    return [body]
"""


def uwsgi(run, *options):
    run.file("app.py", UWSGI_APP)
    run.start("/usr/bin/uwsgi_python3", "--http11-socket", "127.0.0.1:%d" % run.port, "--chdir", run.dir, "--module", "app",
              "--master", "--processes", "2", "--max-requests", "60", *options)
    for n in range(4):
        run.client(requests, n, "/", lambda k: repeated(k, 65536), seconds(4), True, 0.01)
    run.join()


def socat(run, what):
    run.start("socat", "TCP-LISTEN:%d,bind=127.0.0.1,fork,reuseaddr,nodelay" % run.port, what)
    echoes(run)


NODE = """
const cluster = require('cluster'), http = require('http'), cp = require('child_process');
const port = +process.argv[2], how = process.argv[3];
cluster.schedulingPolicy = cluster[how];
const answer = (q, r) => {
  const n = +(q.url.split('?')[1] || 0), line = n + '\\n';
  const body = line.repeat(65536 / line.length + 1).slice(0, 65536);
  const send = () => { r.setHeader('Content-Length', 65536); r.end(body); };
  if (n % 10 == 0) cp.exec('true', send); else send();
};
if (cluster.isPrimary) {
  for (let k = 0; k < 3; k++) cluster.fork();
} else {
  http.createServer(answer).listen(port, '127.0.0.1');
}
"""


def node(run, how):
    run.start("node", run.file("web.js", NODE), run.port, how)
    for n in range(4):
        run.client(requests, n, "/", lambda k: repeated(k, 65536), seconds(4), True, 0.01)
    run.join()


SEND = """
const net = require('net'), cp = require('child_process');
if (process.argv[3] == 'child') {
  process.on('message', (m, s) => { if (s) { s.on('data', (d) => s.write(d)); s.on('end', () => s.end()); s.resume(); } });
} else {
  const children = [0, 1, 2].map(() => cp.fork(process.argv[1], [process.argv[2], 'child']));
  let k = 0;
  net.createServer({pauseOnConnect: true, allowHalfOpen: true}, (s) => { children[k++ % 3].send('take', s); }).listen(+process.argv[2], '127.0.0.1');
}
"""


def node_sends(run):
    """A process sends accepted connections to others."""
    run.start("node", run.file("send.js", SEND), run.port)
    echoes(run)


CASES = {
    "pgbouncer-session": (pgbouncer, "session"),  # a new process takes all connections from the old one
    "pgbouncer-transaction": (pgbouncer, "transaction"),
    "puma": (puma, 0),  # executes itself
    "puma-cluster": (puma, 2),
    "uwsgi": (uwsgi,),
    "uwsgi-threads": (uwsgi, "--enable-threads", "--threads", "3"),
    "socat-exec": (socat, "EXEC:cat"),
    "socat-nofork": (socat, "EXEC:cat,nofork"),
    "socat-pipes": (socat, "EXEC:cat,pipes"),
    "node": (node, "SCHED_RR"),  # one process accepts for the others
    "node-none": (node, "SCHED_NONE"),  # all accept
    "node-sends": (node_sends,),
}
