"""Programs that hand connections to other programs, run as people run them, with every byte compared.

    handovers.py [NAME...]      runs these cases, or all; prints "NAME ok ..." or "NAME FAILED why"; as root
    handovers.py list           their names

Server and client run with the environment of the caller, who so decides whether they are under the shim. If they are,
a process of its own that is not looks on (`underpass ss`), and each case is followed by what it saw and by the daemon's
counters. (`underpass` is searched for beside the library; or $UNDERPASS_TOOL.) HANDOVERS_SLOW: how long a request may take.

Packages: openbsd-inetd ucspi-tcp apache2 lighttpd openssh-server openssh-client netcat-openbsd openjdk-17-jdk-headless
gunicorn postgresql-15 nginx-light systemd pgbouncer puma uwsgi-core uwsgi-plugin-python3 nodejs socat
"""
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback

from handovers_run import (ME, BARE, PATIENCE, Run, Wrong, ask, compare, echo, echoes, free_port, lines,
                           listens, repeated, report, requests, runs, tool, until, watch)
from handovers_servers import answers, hand, hand_by_multiprocessing, in_thread, received, seconds
from handovers_services import CASES as SERVICES, start_postgres
from handovers_texts import APACHE, APP, CGI, JAVA, LIGHTTPD, LINES, NGINX, QUERY


# Cases.

def inetd_like(run, serve):
    serve("/bin/cat")
    echoes(run, 2)
    run.port, run.clients = free_port(), []  # another service at another port
    run.watch()
    serve(run.file("lines", LINES, 0o755))
    for n in range(3):
        run.client(lines, n, seconds(2))
    run.join()


def inetd(run, *options):
    def serve(program):
        what = run.port, program, os.path.basename(program)
        conf = run.file("inetd.conf", "127.0.0.1:%d stream tcp nowait.10000 root %s %s\n" % what)
        run.start("/usr/sbin/inetd", "-i", *options, conf)
    inetd_like(run, serve)


def tcpserver(run):
    inetd_like(run, lambda program: run.start("tcpserver", "-H", "-R", "-l0", "127.0.0.1", run.port, program))


def cgi(run, conf, *server):
    run.file("cgi-bin/script", CGI, 0o755)
    run.start(*server, run.file("conf", conf))
    for n in range(4):
        run.client(requests, n, "/cgi-bin/script", lambda k: repeated(k, 300000), range(20), False, 0.05)
    run.join()


def apache(run, mpm, module):
    more = "ScriptSock %s/cgisock" % run.dir if module == "cgid" else ""
    cgi(run, APACHE.format(run.dir, run.port, mpm, module, more), "apache2", "-d", "/etc/apache2", "-DFOREGROUND", "-f")


def lighttpd(run):
    cgi(run, LIGHTTPD.format(run.dir, run.port), "lighttpd", "-D", "-f")


def options(*all):
    return [w for o in all for w in ("-o", o)]


def ssh_rounds(run, n, *proxy):
    """Through `cat` at the other end: round-trips, then a megabyte."""
    usual = options("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR", "IdentitiesOnly=yes",
                    "BatchMode=yes", *proxy)
    with open(run.path("said"), "ab") as said:
        p = run.spawn("ssh", "-F", "/dev/null", "-p", run.port, "-i", run.path("user"), *usual, "root@127.0.0.1", "cat",
                      stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said)
    data = random.Random(n).randbytes(1 << 20)
    for i in range(20):  # (The first one logs in.)
        part = data[i * 40000:i * 40000 + 1 + i * 2000]
        with run.request(len(part)):
            p.stdin.write(part)
            p.stdin.flush()
            compare(p.stdout.read(len(part)), part)
        time.sleep(0.08)
    with run.request(len(data)):
        in_thread(lambda: (p.stdin.write(data), p.stdin.close()))
        compare(p.stdout.read(), data)
    if p.wait(PATIENCE):
        raise Wrong("ssh ended with %d" % p.returncode)


def ssh(run):
    os.makedirs("/run/sshd", exist_ok=True)
    for k in "host", "user":
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", run.path(k)], check=True, env=BARE)
    run.start("/usr/sbin/sshd", "-D", "-e", "-p", run.port, "-f", "/dev/null", *options(
        "ListenAddress=127.0.0.1", "HostKey=" + run.path("host"), "AuthorizedKeysFile=" + run.path("user.pub"),
        "StrictModes=no", "UsePAM=no", "PermitRootLogin=yes", "PidFile=" + run.path("pid")))
    run.client(ssh_rounds, 0)
    run.client(ssh_rounds, 1, "ProxyCommand=nc.openbsd %h %p")
    run.client(ssh_rounds, 2, "ProxyCommand=nc.openbsd -F %h %p", "ProxyUseFdpass=yes")
    run.join()


def passed(port):
    """What `nc -F` has connected and sends."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            p = subprocess.Popen(["nc.openbsd", "-F", "127.0.0.1", str(port)], stdin=theirs, stdout=theirs)
        conn = received(ours)
        if p.wait(PATIENCE):
            raise Wrong("nc ended with %d" % p.returncode)
    conn.settimeout(PATIENCE)
    return conn


def nc_passes(run):
    run.start(sys.executable, ME, "hand", run.port, "at-once")
    echoes(run, conns=[passed(run.port) for _ in range(3)])


def java(run, *options):
    run.start("java", "-Xmx128m", *options, run.file("Helpers.java", JAVA), run.port, run.path("ended"))
    stop = threading.Event()
    for n in range(5):
        run.client(echo, n, iter(stop.is_set, True), n % 2 * 0.01)
    until("the helpers have ended", PATIENCE, lambda: run.wrong or os.path.exists(run.path("ended")))
    on_lanes = lambda: sum(r["mode"] == "SMCD" and r["up"] == "both" for r in (run.looks() or [[]])[-1])
    try:
        if tool():
            until("all connections are on lanes again", 5, lambda: run.wrong or on_lanes() == 10)
    finally:
        stop.set()
        run.join()


def gunicorn(run, *options):
    run.file("app.py", APP)
    run.start("/usr/bin/gunicorn", "--chdir", run.dir, "-u", "www-data", "-g", "www-data", "-w", "2", "--max-requests",
              "50", "--graceful-timeout", "3", "-b", "127.0.0.1:%d" % run.port, *options, "app:app")
    for n in range(4):
        run.client(requests, n, "/", lambda k: repeated(k, 65536), seconds(3.5), True, 0.01)
    run.join()
    if run.read("said").count("Booting worker") < 4:
        raise Wrong("no worker was replaced")


def copy_out(run, n, psql, wanted):
    out = "copy (%s) to stdout; select pg_sleep(0.05);\n" % QUERY
    ids = run.path("pg/ids%d" % n)
    sql = (out + "copy (select id from rows order by id) to program 'cat >%s';\n" % ids) * 8 + out * 12
    p = subprocess.run([*psql, "-h", "127.0.0.1"], input=sql.encode(), capture_output=True, timeout=PATIENCE)
    with run.request(len(p.stdout)):
        compare(p.stderr, b"")
        compare(p.stdout, (wanted + b"\nCOPY 9000\n") * 8 + (wanted + b"\n") * 12)
        with open(ids, "rb") as f:
            compare(f.read(), b"".join(b"%d\n" % i for i in range(1, 9001)))


def postgres(run):
    """Parallel queries; and backends that have connections start programs."""
    bin = start_postgres(run, run.port, "force_parallel_mode=on", "min_parallel_table_scan_size=0", "parallel_setup_cost=0",
                         "parallel_tuple_cost=0", "max_parallel_workers_per_gather=3")
    psql = [bin + "/psql", "-U", "postgres", "-p", str(run.port), "-XAt", "-v", "ON_ERROR_STOP=1", "postgres"]
    unix = dict(env={**BARE, "PGHOST": run.path("pg")}, stdout=subprocess.PIPE)
    tell = lambda sql: subprocess.run([*psql, "-c", sql], check=True, **unix).stdout
    tell("create table rows as select generate_series(1, 9000) id")
    tell("analyze rows")
    if b"Workers Launched" not in tell("explain analyze " + QUERY):
        raise Wrong("no parallel query")
    wanted = tell("copy (%s) to stdout" % QUERY)
    for n in range(2):
        run.client(copy_out, n, psql, wanted)
    run.join()


def nginx(run, more):
    """The binary is replaced."""
    big = random.Random(1).randbytes(500000)
    run.file("big", big)
    run.start("/usr/sbin/nginx", "-c", run.file("conf", NGINX.format(run.dir, run.port, more)), "-e",
              run.path("nginx.log"), ends=True)
    until("its number", PATIENCE, lambda: os.path.exists(run.path("nginx.pid")) and run.read("nginx.pid"))
    old = int(run.read("nginx.pid"))
    run.groups.append(old)
    for n in range(6):
        run.client(requests, n, "/big", lambda k: big, seconds(4.5), True, 0.01 * (n % 3))
    time.sleep(1)
    os.kill(old, signal.SIGUSR2)
    until("the new one runs", PATIENCE, lambda: os.path.exists(run.path("nginx.pid.oldbin")) and os.path.exists(
        run.path("nginx.pid")) and run.read("nginx.pid"))
    time.sleep(0.5)
    os.kill(old, signal.SIGWINCH)
    time.sleep(0.8)
    os.kill(old, signal.SIGQUIT)
    run.join()
    until("the old one has ended", PATIENCE, lambda: not runs(old))
    if not runs(int(run.read("nginx.pid"))) or not listens(run.port):
        raise Wrong("the new one does not run")


def activated(run, how, command, passed):
    env = ["%s=%s" % (k, os.environ[k]) for k in ("LD_PRELOAD", "UNDERPASS", "UNDERPASS_DIR") if k in os.environ and passed]
    run.start("systemd-socket-activate", "-l", "127.0.0.1:%d" % run.port, *[w for e in env for w in ("-E", e)], *how, *command)
    echoes(run)


def handed(run, how, how_long=3):
    run.start(sys.executable, ME, "hand", run.port, how)
    echoes(run, how_long)


CASES = {
    "inetd": (inetd, "-E"),
    "inetd-launders": (inetd,),  # as Debian starts it: its programs get no LD_PRELOAD
    "tcpserver": (tcpserver,),
    "apache-cgi": (apache, "prefork", "cgi"),
    "apache-cgid": (apache, "event", "cgid"),
    "lighttpd-cgi": (lighttpd,),
    "ssh": (ssh,),
    "nc-passes": (nc_passes,),
    "java": (java,),
    "java-vfork": (java, "-Djdk.lang.Process.launchMechanism=VFORK"),
    "java-fork": (java, "-Djdk.lang.Process.launchMechanism=FORK"),
    "gunicorn": (gunicorn, "-k", "gthread", "--threads", "4", "--keep-alive", "5"),
    "gunicorn-sync": (gunicorn,),
    "postgres": (postgres,),
    "nginx": (nginx, "env LD_PRELOAD; env UNDERPASS_DIR; env UNDERPASS;"),
    "nginx-launders": (nginx, ""),  # the new binary gets no LD_PRELOAD
    "systemd-listener": (activated, [], [sys.executable, ME, "listener"], True),
    "systemd-accept": (activated, ["--accept", "--inetd"], ["/bin/cat"], True),
    "systemd-launders": (activated, ["--accept", "--inetd"], ["/bin/cat"], False),
    "fds-at-once": (handed, "at-once"),
    "fds-after-traffic": (handed, "after"),
    "fds-kept": (handed, "kept", 6),
    "fds-back-and-forth": (handed, "back"),
    "mp-pipe": (handed, "pipe"),
    "mp-spawn": (handed, "spawn"),
    "mp-forkserver": (handed, "forkserver"),
    **SERVICES,
}
# What stays on TCP, and the reason that an end names.
TCP = {
    **{n: "peer-no-shim" for n in CASES if n.endswith("-launders")},
    "ssh": "seccomp",  # (sshd's)
    "nc-passes": "unseen-holders",  # (a socket pair that this program has made)
    "gunicorn-sync": "young",  # (one connection for each request)
}


def one(name):
    run, why = Run(name), None
    before, last = (ask(tool(), "stats"), (ask(tool(), "log") or [""])[-1]) if tool() else (None, "")
    began = time.monotonic()
    try:
        run.watch()
        f, *args = CASES[name]
        f(run, *args)
    except Exception as e:
        why = str(e) if isinstance(e, Wrong) else traceback.format_exc()
    finally:
        took = time.monotonic() - began
        run.end()
    if tool():
        why = "; ".join(filter(None, [why, report(run, before, last, TCP.get(name))]))
    print("%s %s (%.1f s, %d requests, %d kB, slowest %.2f s, %d again)" % (
        name, "FAILED " + why if why else "ok", took, run.requests, run.moved / 1000, run.slowest, run.again), flush=True)
    if why and os.path.exists(run.path("said")):
        print("  said: " + run.read("said")[-1500:])
    shutil.rmtree(run.dir, ignore_errors=True)
    return not why


def main():
    what, *args = sys.argv[1:] or [""]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if what == "list":
        print("\n".join(CASES))
    elif what == "watch":
        watch(*args)
    elif what == "listener":
        answers(lambda listener=socket.socket(fileno=3): listener.accept()[0])
    elif what == "hand":
        (hand_by_multiprocessing if args[1] in ("pipe", "spawn", "forkserver") else hand)(int(args[0]), args[1])
    else:
        sys.exit(not all([one(n) for n in sys.argv[1:] or CASES]))


if __name__ == "__main__":
    main()
