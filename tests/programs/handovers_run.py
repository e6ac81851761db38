"""What handovers' cases have in common: a case's programs and clients, and a process that looks on."""
import collections
import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

from handovers_servers import in_thread, seconds

ME = os.path.join(os.path.dirname(os.path.abspath(__file__)), "handovers.py")
SHIM = os.environ.get("LD_PRELOAD", "")
BARE = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
PATIENCE = 40
SLOW = float(os.environ.get("HANDOVERS_SLOW", 15))


class Wrong(Exception):
    pass


def until(what, limit, f):
    end = time.monotonic() + limit
    while not f():
        if time.monotonic() > end:
            raise Wrong("not in %d s: %s" % (limit, what))
        time.sleep(0.03)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def listens(port):
    wanted = re.compile(r":%04X 0+:0000 0A" % port)
    return any(wanted.search(open("/proc/net/" + f).read()) for f in ("tcp", "tcp6"))


def runs(pid):
    return os.path.exists("/proc/%d/exe" % pid)  # (not that of a zombie)


class Run:
    """One case: its directory, its programs, and what its clients found."""

    def __init__(self, name):
        self.name, self.port = name, free_port()
        self.dir = tempfile.mkdtemp(prefix="handovers-")
        os.chmod(self.dir, 0o755)
        self.programs, self.groups, self.clients, self.wrong = [], [], [], []
        self.slowest, self.requests, self.moved, self.again = 0.0, 0, 0, 0
        self.lock = threading.Lock()

    def path(self, name):
        return os.path.join(self.dir, name)

    def file(self, name, text, mode=0o644):
        os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
        with open(self.path(name), "wb") as f:
            f.write(text if isinstance(text, bytes) else text.encode())
        os.chmod(self.path(name), mode)
        return self.path(name)

    def read(self, name):
        with open(self.path(name)) as f:
            return f.read()

    def spawn(self, *argv, **more):
        p = subprocess.Popen([str(a) for a in argv], start_new_session=True, **more)
        self.programs.append(p)
        self.groups.append(p.pid)
        return p

    def start(self, *argv, ends=False, **more):
        """A server; `ends`: it goes to the background."""
        with open(self.path("said"), "ab") as said:
            p = self.spawn(*argv, stdin=subprocess.DEVNULL, stdout=said, stderr=said, **more)
        until("%s listens" % argv[0], PATIENCE, lambda: (p.poll() is not None) > ends or listens(self.port))
        if p.poll() is not None and not ends:
            raise Wrong("%s ended with %s" % (argv[0], p.returncode))

    def watch(self):
        if tool():
            with open(self.path("watched"), "ab") as out:
                self.spawn(sys.executable, ME, "watch", self.port, tool(), stdout=out, env=BARE)

    def looks(self):
        return [json.loads(line) for line in self.read("watched").rpartition("\n")[0].splitlines()]

    def client(self, f, *args):
        def guarded():
            try:
                f(self, *args)
            except Exception as e:
                self.wrong.append("%s%s: %s %s" % (f.__name__, args[:1], type(e).__name__, e))
        self.clients.append(threading.Thread(target=guarded, daemon=True))
        self.clients[-1].start()

    def join(self, limit=60):
        end = time.monotonic() + limit
        for t in self.clients:
            t.join(max(0, end - time.monotonic()))
            if t.is_alive():
                self.wrong.append("a client hangs")
        if self.wrong:
            raise Wrong("; ".join(self.wrong[:3]))

    @contextlib.contextmanager
    def request(self, size):
        t = time.monotonic()
        yield
        t = time.monotonic() - t
        with self.lock:
            self.slowest, self.requests, self.moved = max(self.slowest, t), self.requests + 1, self.moved + size
        if t > SLOW:
            raise Wrong("%.1f s for one request" % t)

    def end(self):
        for sig in signal.SIGTERM, signal.SIGKILL:
            for g in self.groups:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(g, sig)
            end = time.monotonic() + 1.5
            while any(p.poll() is None for p in self.programs) and time.monotonic() < end:
                time.sleep(0.02)


# Clients.

def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)


def exactly(s, n):
    got = bytearray()
    while len(got) < n:
        b = s.recv(min(n - len(got), 65536))
        if not b:
            raise Wrong("ended after %d of %d bytes" % (len(got), n))
        got += b
    return got


def compare(got, wanted):
    if got != wanted:
        at = next((i for i, (a, b) in enumerate(zip(got, wanted)) if a != b), min(len(got), len(wanted)))
        raise Wrong("BYTES DIFFER at %d (%d of %d)" % (at, len(got), len(wanted)))


def repeated(n, size):
    line = b"%d\n" % n
    return (line * (size // len(line) + 1))[:size]


def echo(run, n, times, pause=0.0, conn=None):
    """Round-trips, then a megabyte in one piece, up to the other's end of file."""
    rnd = random.Random(n)
    with conn or connect(run.port) as s:
        for _ in times:
            data = rnd.randbytes(rnd.choice((1, 200, 5000, 60000)))
            with run.request(len(data)):
                s.sendall(data)
                compare(exactly(s, len(data)), data)
            time.sleep(pause)
        data = rnd.randbytes(1 << 20)
        with run.request(len(data)):
            in_thread(lambda: (s.sendall(data), s.shutdown(socket.SHUT_WR)))
            compare(exactly(s, len(data)), data)
            compare(s.recv(1), b"")


def echoes(run, how_long=2.5, conns=(None,) * 4):
    for n, conn in enumerate(conns):
        run.client(echo, n, seconds(how_long), n % 2 * 0.01, conn)
    run.join()


def lines(run, n, times):
    """Requests to LINES: connections of 1 request up to 30."""
    rnd = random.Random(n)
    for _ in times:
        with connect(run.port) as s:
            for _ in range(rnd.choice((1, 3, 30))):
                k = rnd.randrange(10**9)
                with run.request(200000):
                    s.sendall(b"%d\n" % k)
                    compare(exactly(s, 200000), repeated(k, 200000))
                time.sleep(rnd.choice((0, 0, 0.02)))
            s.shutdown(socket.SHUT_WR)
            compare(s.recv(1), b"")


def requests(run, n, path, answer, times, retry=False, pause=0.0):
    """HTTP. With `retry`, as browsers do: again if the server closes a used connection instead of an answer."""
    rnd, conn = random.Random(n), None
    for _ in times:
        k, r = rnd.randrange(10**9), None
        with run.request(len(answer(k))):
            while r is None:
                fresh = conn is None
                conn = conn or http.client.HTTPConnection("127.0.0.1", run.port, timeout=PATIENCE)
                try:
                    conn.request("GET", "%s?%d" % (path, k))
                    r = conn.getresponse()
                except (ConnectionResetError, BrokenPipeError):
                    if fresh or not retry:
                        raise
                    conn.close()
                    conn, run.again = None, run.again + 1
            body = r.read()
        if r.status != 200 or r.will_close > retry:
            raise Wrong("status %d%s" % (r.status, ", not kept alive" * r.will_close))
        compare(body, answer(k))
        if r.will_close:
            conn.close()
            conn = None
        time.sleep(pause)


# Looking on.

def tool():
    lib = os.path.dirname(SHIM.split(":")[0])
    for p in os.environ.get("UNDERPASS_TOOL", ""), lib + "/underpass", lib + "/../bin/underpass":
        if SHIM and os.access(p, os.X_OK):
            return p


def ask(tool, *what):
    out = subprocess.run([tool, *what, "-j"], env=BARE, capture_output=True)
    return json.loads(out.stdout) if out.returncode == 0 else None


def watch(port, tool):
    """Without the shim: the rows of connections to this port, a line each time."""
    mine = lambda r: ("%s %s " % (r["local"], r["peer"])).count(":%s " % port)
    while True:
        rows = [r for r in ask(tool, "ss", "-e") or [] if mine(r)]
        print(json.dumps([{k: r[k] for k in ("comm", "role", "mode", "up", "reason", "peer_reason")} for r in rows]), flush=True)
        time.sleep(0.2)


def report(run, before, last, stays):
    """What was seen how often, and what is new. What of that is wrong. `stays`: the reason for which it stays on TCP, if it does."""
    seen = collections.Counter()
    for r in sum(run.looks(), []):
        reasons = "/".join((r[k] or {}).get("name", "-") for k in ("reason", "peer_reason"))
        seen["%s %s %s" % (r["comm"], r["role"], "SMCD" if r["mode"] == "SMCD" else "TCP " + reasons)] += 1
    print("  seen: " + "; ".join("%s %d" % i for i in sorted(seen.items())))
    stats, log = ask(tool(), "stats"), ask(tool(), "log")
    keys = "registered", "paired", "promoted", "ups", "downs", "taken_over", "declined", "resets"
    print("  stats: " + ", ".join("%s %d" % (k, stats[k] - before[k]) for k in keys))
    new = log[log.index(last) + 1:] if last in log else log
    new = [re.sub(r"^\S+ (.*?)\[\d+\]|[\d.]+:\d+|connection \d+", r"\1", line) for line in new]
    told = collections.Counter(n for n in new if not re.search(" (connected|disconnected|ended|registered|paired)( |$)", n))
    print("  log: " + "; ".join("%s %d" % i for i in told.most_common(12)), flush=True)
    promoted = stats["promoted"] - before["promoted"]
    if stats["resets"] != before["resets"]:
        return "reset by the shim"
    # (With the eager rules some of these are on lanes.)
    good = promoted >= 4 or stays and any(stays in s for s in seen)
    return "" if good else "%d ends on lanes" % promoted
