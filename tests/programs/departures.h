/* The other end of departures.c: on this machine, in this network namespace or another one, or on another machine, where
 * `departures --serve` runs.
 *
 *     OTHER_NS=/run/netns/NAME ADDRESS=IP    it is in that namespace, and has that address
 *     OTHER=IP:PORT                          it is on the machine where `departures --serve IP:PORT` runs
 */
#include "pairs.h"
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stddef.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

enum { CLOSE = 7, CLOSE_WAIT = 8 }; /* states of TCP */
enum { MORE = 1000, OUT = 300, REPLY = 500, MOST = 600000, RING = 300000, CHUNK = 20000, HANG_MS = 30000 };

enum { DUP2, SYSTEM, POPEN, SPAWN, VFORK, FORK_EXEC, FORK_EXEC_KEPT, FORK_EXEC_BARE, FORK_EXEC_BARE_KEPT, EXEC, EXEC_BARE, RIGHTS, SPLICE,
       LOWAT, INQ, FDOPEN, DPRINTF, SENDFILE, ASYNC, WAYS };
static const char *const ways[] = {"dup2", "system", "popen", "spawn", "vfork", "fork-exec", "fork-exec-kept", "fork-exec-bare",
                                   "fork-exec-bare-kept", "exec", "exec-bare", "rights", "splice", "lowat", "inq", "fdopen", "dprintf",
                                   "sendfile", "async"};

/* HALF and BOTH: the peer has shut down what it sends, or both directions; OURS: this end has, both. */
enum { ASLEEP, COMPUTING, STOPPED, OURS, HALF, BOTH, CLOSED, EXITED, KILLED, PEERS };
static const char *const peers[] = {"asleep", "computing", "stopped", "ours", "half", "both", "closed", "exited", "killed"};

/* MIXED: some on TCP, and then some on the ring. */
enum { NONE, ONE, SOME, MIXED, FULL, OVER, STUCK, AMOUNTS };
static const char *const amounts[] = {"0", "1", "2000", "mixed", "full", "over", "stuck"};
static const long bytes[] = {0, 1, 2000, 2000, RING, MOST, MOST};

struct cell {
    int way, peer, unread, own;
};

/* What all processes of a cell share. With two machines, each has one, and `relay` copies what a side writes to the other
 * side's. */
struct shared {
    /* The leaving end's: */
    volatile int own_done, go, wakes, begins;
    struct cell cell;
    volatile int own_by_ring;
    volatile long own_sent, out;
    /* The peer's: */
    volatile int listens, there, arrived, ended;
    volatile int by_ring, status, up;
    volatile long sent;
    struct sockaddr_in address;
    char peer_says[40];
    /* Only here: */
    volatile int lane;
    volatile long at, began, took; /* read by the leaving end; its leaving call, in microseconds */
    volatile long waited, waits, uses;
    pid_t peer;
    char line[400];
};

static struct shared *s;
static int is_gone(void) { return s->cell.peer >= CLOSED; }
static int is_deaf(void) { return s->cell.peer >= BOTH; }
static int goes_on(void) { return s->cell.peer <= STOPPED; }
static int is_bare(void) { return !getenv("LD_PRELOAD"); }
static int is_stuck(void) { return s->cell.unread == STUCK || s->cell.own == STUCK; }
static int writes(int way) { return way == DPRINTF || way == SENDFILE; }

/* The peer's kernel may drop bytes that this end's kernel has no room for yet: no one knows how many. */
static int may_lose(void) { return s->cell.unread >= FULL && ((is_gone() && s->cell.own) || (is_deaf() && writes(s->cell.way))); }

static char pattern(long i) { return (char)(' ' + ((i * 2654435761u) >> 13) % 64); }

static int option(int fd, int level, int name, int value) { return !setsockopt(fd, level, name, &value, sizeof value); }

/* Sends as many bytes as are taken without waiting. Were they sent on the ring? */
static int fill(int fd, long amount, volatile long *sent) {
    static char buf[MOST];
    unsigned long before = info(fd).tcpi_bytes_sent;
    for (long i = 0; i < amount; i++) buf[i] = pattern(i);
    for (long n; *sent < amount; *sent += n) {
        long most = amount - *sent < 65536 ? amount - *sent : 65536;
        if ((n = send(fd, buf + *sent, (size_t)most, MSG_DONTWAIT | MSG_NOSIGNAL)) < 0) break;
    }
    NEED(*sent == amount || (amount >= RING && *sent > 2000));
    return *sent && !is_bare() && info(fd).tcpi_bytes_sent == before;
}

/* Until bytes that are on TCP have come. */
static void arrive(int fd, long sent) {
    for (int k = 0, n = 0; k < 10000 && n < sent && n < 2000; k++, sleep_us(100)) NEED(!raw(SYS_ioctl, fd, FIONREAD, (long)&n, 0, 0));
}

/* Until bytes that are on their way to another machine's ring have come. */
static void land(int fd, long sent) {
    for (int k = 0, n = 0; k < 10000 && n < sent && n < 2000; k++, sleep_us(200)) NEED(!ioctl(fd, FIONREAD, &n));
}

static long send_pattern(int fd, long at, long amount) {
    char buf[MORE];
    for (long i = 0; i < amount; i++) buf[i] = pattern(at + i);
    return send(fd, buf, (size_t)amount, MSG_NOSIGNAL);
}

/* ---- the other end ---- */

/* The same, but more comes with the first answer, and each later one comes behind that, until they go by the ring. */
static void answer_mixed(int b) {
    char c;
    for (int k = 0; NEED(recv(b, &c, 1, 0) == 1), c != 'g'; k++) {
        unsigned long before = info(b).tcpi_bytes_sent;
        char buf[MORE + MORE + 1];
        long n = k ? 1 : (long)sizeof buf;
        for (long i = 0; i < n; i++) buf[i] = pattern(s->sent + i);
        NEED(send(b, buf, (size_t)n, 0) == n);
        s->sent += n;
        s->up = info(b).tcpi_bytes_sent == before;
    }
}

/* The connection comes onto a lane by single bytes there and back; the other end says whether TCP saw the last one. */
static void answer(int b) {
    char c;
    for (unsigned long before = info(b).tcpi_bytes_received, now; NEED(recv(b, &c, 1, 0) == 1), c != 'g'; before = now) {
        now = info(b).tcpi_bytes_received;
        NEED(send(b, now == before ? "l" : "t", 1, 0) == 1);
    }
}

static _Noreturn void peer_ends(const char *why) {
    strcpy(s->peer_says, why);
    _exit(1);
}

/* All bytes of the other end up to `end`. */
static void verify(int b, long *at, long end) {
    static char buf[CHUNK];
    while (*at < end) {
        long k = recv(b, buf, (size_t)(end - *at < CHUNK ? end - *at : CHUNK), 0);
        if (k < 0) peer_ends(strerrorname_np(errno));
        if (!k) peer_ends("sees an early end");
        for (long i = 0; i < k; i++)
            if (buf[i] != pattern(*at + i)) peer_ends("sees a wrong byte");
        *at += k;
    }
}

static void go_on(int b) {
    long at = 0;
    char c;
    verify(b, &at, s->own_sent + (s->cell.peer == BOTH ? 0 : s->out));
    if (s->cell.peer == OURS && recv(b, &c, 1, 0)) peer_ends("sees no end");
    if (s->cell.peer == OURS || s->cell.peer == BOTH) return;
    if (goes_on() && send_pattern(b, s->sent, MORE) != MORE) peer_ends("cannot send");
    verify(b, &at, s->own_sent + s->out + REPLY);
    if (s->cell.peer == HALF && recv(b, &c, 1, 0)) peer_ends("sees no end");
    close(b);
}

static _Noreturn void peer(int b) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(listener);
    NEED(b >= 0 && option(b, IPPROTO_TCP, TCP_NODELAY, 1));
    if (s->cell.unread == MIXED) answer_mixed(b);
    else answer(b);
    if (is_stuck()) narrow(b, 50000); /* (the shim has seen no narrow buffers) */
    while (!s->own_done) sleep_us(500);
    if (!s->own_by_ring) arrive(b, s->own_sent);
    else if (s->begins) land(b, s->own_sent);
    s->by_ring = fill(b, s->sent + bytes[s->cell.unread], &s->sent);
    if (s->cell.peer == HALF || s->cell.peer == BOTH) NEED(!shutdown(b, s->cell.peer == HALF ? SHUT_WR : SHUT_RDWR));
    if (s->cell.peer == CLOSED) close(b);
    s->there = 1;
    if (s->cell.peer == EXITED) exit(0);
    if (s->cell.peer == KILLED) kill(getpid(), SIGKILL);
    if (s->cell.peer == STOPPED) raise(SIGSTOP);
    else if (s->cell.peer == COMPUTING)
        while (!s->go) {}
    else
        while (!s->go) sleep_us(1000);
    if (s->cell.peer != CLOSED) go_on(b);
    _exit(0);
}

/* ---- where it runs ---- */

static void enter_namespace(const char *path) {
    int ns = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (path) NEED(ns >= 0 && !raw(SYS_setns, ns, 0, 0, 0, 0) && !close(ns));
}

/* Forks the peer, which listens at `ip`. */
static pid_t fork_peer(const char *ip) {
    socklen_t n = sizeof s->address;
    pid_t child = fork();
    NEED(child >= 0);
    if (child) return child;
    enter_namespace(getenv("OTHER_NS"));
    struct sockaddr_in at = {.sin_family = AF_INET};
    listener = socket(AF_INET, SOCK_STREAM, 0);
    NEED(inet_pton(AF_INET, ip, &at.sin_addr) == 1 && !bind(listener, (void *)&at, n));
    NEED(!listen(listener, 1) && !getsockname(listener, (void *)&at, &n));
    s->address = at, s->listens = 1;
    peer(accept(listener, 0, 0));
}

/* Has it done what it does before the leaving? */
static int is_there(pid_t child) {
    siginfo_t i = {0};
    int how = s->cell.peer == STOPPED ? WSTOPPED : s->cell.peer > CLOSED ? WEXITED : 0;
    return s->there && (!how || (!waitid(P_PID, (id_t)child, &i, how | WNOWAIT | WNOHANG) && i.si_pid));
}

/* What a side writes. The first words say that the others are there. */
struct side {
    size_t at, bytes;
};
#define SIDE(first, next) ((struct side){offsetof(struct shared, first), offsetof(struct shared, next) - offsetof(struct shared, first)})
enum { FLAGS = 4 * sizeof(int) };

static void raw_all(long call, int fd, char *at, size_t n) {
    for (long k; n; at += k, n -= (size_t)k)
        if ((k = raw(call, fd, (long)at, (long)n, 0, 0)) <= 0) _exit(0); /* the other side has ended */
}

/* Copies this side's words to the other machine and that one's here, until the peer has ended. (No shim sees this.) */
static _Noreturn void relay(int fd, struct side mine, struct side its, void (*turn)(void)) {
    static char last[sizeof *s], now[sizeof *s];
    char *here = (char *)s + mine.at, *there = (char *)s + its.at;
    for (int over = 0; !over; sleep_us(300)) {
        struct pollfd p = {fd, POLLIN, 0};
        turn();
        over = s->ended;
        memcpy(now, here, FLAGS);
        __sync_synchronize();
        memcpy(now + FLAGS, here + FLAGS, mine.bytes - FLAGS);
        if (memcmp(now, last, mine.bytes)) raw_all(SYS_write, fd, memcpy(last, now, mine.bytes), mine.bytes);
        if (raw(SYS_ppoll, (long)&p, 1, (long)&(struct timespec){0}, 0, 0) != 1) continue;
        raw_all(SYS_read, fd, now, its.bytes);
        memcpy(there + FLAGS, now + FLAGS, its.bytes - FLAGS);
        __sync_synchronize();
        memcpy(there, now, FLAGS);
    }
    _exit(0);
}

static void nothing(void) {}

/* A socket at, or to, "IP:PORT". */
static int raw_socket(const char *where, long call) {
    struct sockaddr_in to = {.sin_family = AF_INET};
    char ip[40] = "";
    unsigned port;
    int on = 1;
    NEED(sscanf(where, "%39[^:]:%u", ip, &port) == 2 && inet_pton(AF_INET, ip, &to.sin_addr) == 1);
    to.sin_port = htons((uint16_t)port);
    int fd = (int)raw(SYS_socket, AF_INET, SOCK_STREAM, 0, 0, 0);
    raw(SYS_setsockopt, fd, SOL_SOCKET, SO_REUSEADDR, (long)&on, sizeof on);
    NEED(fd >= 0 && !raw(call, fd, (long)&to, sizeof to, 0, 0));
    return fd;
}

/* Starts the peer of the leaving end. */
static void start_peer(void) {
    const char *other = getenv("OTHER"), *ip = getenv("ADDRESS");
    pid_t child = other ? fork() : fork_peer(ip ? ip : "127.0.0.1");
    if (child) s->peer = child;
    if (!child) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        s->begins = 1;
        relay(raw_socket(other, SYS_connect), SIDE(own_done, listens), SIDE(listens, lane), nothing);
    }
    for (int k = 0; !s->listens; k++, sleep_us(200)) NEED(k < 50000);
}

static void until_peer_is_there(void) {
    for (int k = 0; getenv("OTHER") ? !s->arrived : !is_there(s->peer); k++, sleep_us(500)) NEED(k < 20000);
}

static void wake_peer(void) {
    s->wakes = 1;
    if (!getenv("OTHER")) kill(s->peer, SIGCONT);
}

/* How it has ended. */
static int end_of_peer(void) {
    int status = 0;
    NEED(waitpid(s->peer, &status, 0) == s->peer);
    return getenv("OTHER") ? s->status : status;
}

/* ---- the other machine's side ---- */

static const char *serves_at;

static void serve_turn(void) {
    int status;
    if (!s->begins) return;
    if (!s->peer) s->peer = fork_peer(serves_at);
    if (s->wakes == 1) s->wakes = 2, kill(s->peer, SIGCONT);
    if (!s->arrived) s->arrived = is_there(s->peer);
    else if (waitpid(s->peer, &status, WNOHANG) == s->peer) s->status = status, s->ended = 1;
}

/* For each connection to `where` ("IP:PORT"), a process that has the peer of one cell. */
static _Noreturn void serve(const char *where) {
    int fd = raw_socket(where, SYS_bind);
    NEED(!raw(SYS_listen, fd, 100, 0, 0, 0));
    signal(SIGCHLD, SIG_IGN);
    puts("serves"), fflush(stdout);
    for (;;) {
        char of[16];
        int one = (int)raw(SYS_accept, fd, 0, 0, 0, 0);
        if (!fork()) {
            signal(SIGCHLD, SIG_DFL);
            sprintf(of, "%d", one);
            execl("/proc/self/exe", "departures", "--other", of, where, (char *)0);
            _exit(1);
        }
        raw(SYS_close, one, 0, 0, 0, 0);
    }
}

static _Noreturn void serve_one(int fd, const char *where) {
    static char ip[40];
    NEED(sscanf(where, "%39[^:]", ip) == 1);
    serves_at = ip;
    s = mmap(0, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    relay(fd, SIDE(listens, lane), SIDE(own_done, listens), serve_turn);
}
