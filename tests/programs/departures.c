/* One end leaves its lane in one of many WAYs, while the other end, the PEER, does one of many things, with bytes of the
 * peer UNREAD, and with bytes of its OWN that the peer has not read. A line for each cell of that matrix says what the
 * application saw; it is the same bare and on lanes.
 *
 *     departures [FILTER...]    the cells whose "/WAY/PEER/unread-N/own-N/" contains each FILTER (and no FILTER of "!FILTER")
 *
 *     EVERY=N departures ...    every Nth of them
 *
 * A cell is a process of its own, executed anew (so that one that is reset blows no fuse of another's), and AT_ONCE (8)
 * of them run at a time. On stderr: how many were on a lane in both directions, how many directions had the unread bytes
 * there, the slowest leaving call, and the most waits (voluntary switches) of one, with the first call after it that reads
 * or counts. The exit status is 1 if a cell was not on a lane under the shim, crashed or hung.
 *
 * "full" is what a ring takes at once; "over" is more, and what send() takes of it without waiting: where TCP would take
 * more than the ring, the lane goes down by itself. "stuck" is the same with TCP's buffers made so small that it does not
 * take what the ring has. "mixed" is some bytes on TCP, unread when the peer goes to its ring, and some there.
 */
#define _GNU_SOURCE
#include "departures.h"
#include <spawn.h>
#include <stdarg.h>
#include <sys/resource.h>
#include <sys/sendfile.h>

static volatile int sigios;

static long now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

/* How often this thread has waited for something; exec keeps it. */
static long waits(void) {
    struct rusage u;
    NEED(!getrusage(RUSAGE_THREAD, &u));
    return u.ru_nvcsw;
}

static void add_waits(long since) { __sync_fetch_and_add(&s->waits, waits() - since); }

/* Who has the shim may leave only when it uses the connection. */
static void used(long since) {
    int e = errno;
    if (!s->uses++) add_waits(since);
    errno = e;
}

static void say(const char *format, ...) {
    size_t n = strlen(s->line);
    va_list args;
    va_start(args, format);
    vsnprintf(s->line + n, sizeof s->line - n, format, args);
    va_end(args);
}

static void say_result(const char *what, long r) {
    if (r < 0) say(", %s %s", what, strerrorname_np(errno));
    else say(", %s %ld", what, r);
}

/* ---- before the leaving ---- */

static void bring_up_mixed(int a) {
    unsigned long before;
    char c;
    for (int k = 0; k < (is_bare() ? 3 : 1500) && !s->lane; k++) {
        if (k && !is_bare()) sleep_us(1000);
        before = info(a).tcpi_bytes_sent;
        NEED(send(a, "w", 1, 0) == 1 && recv(a, &c, 1, 0) == 1 && c == pattern(s->at++));
        s->lane = !is_bare() && s->up && info(a).tcpi_bytes_sent == before;
    }
    NEED(send(a, "g", 1, 0) == 1);
}

static void bring_up(int a) {
    char c;
    unsigned long before = info(a).tcpi_bytes_received, now;
    for (int k = 0; k < (is_bare() ? 3 : 5000) && !s->lane; k++, before = now) {
        if (k && !is_bare()) sleep_us(1000);
        NEED(send(a, "w", 1, 0) == 1 && recv(a, &c, 1, 0) == 1);
        now = info(a).tcpi_bytes_received;
        s->lane = !is_bare() && c == 'l' && now == before;
    }
    NEED(send(a, "g", 1, 0) == 1);
}

/* What the peer's kernel says of its end has come; a FIN cannot while there is no room for the bytes before it. */
static void until_told(int a) {
    int reset = is_gone() && s->cell.own && (is_bare() || s->begins); /* (on a lane it may know of no bytes unread) */
    int tries = s->cell.unread >= FULL && !reset ? 30 : 2000;
    for (int k = 0; k < tries; k++, sleep_us(1000)) {
        int state = info(a).tcpi_state;
        if (state == CLOSE || (state == CLOSE_WAIT && !reset)) return;
    }
}

static void until_there(int a) {
    until_peer_is_there();
    if (!s->by_ring) arrive(a, s->sent);
    else if (getenv("OTHER")) land(a, s->sent);
    if (s->cell.peer >= HALF) until_told(a);
    sleep_us(5000);
}

static int prepared(void) {
    start_peer();
    struct sockaddr_in to = s->address;
    int a = socket(AF_INET, SOCK_STREAM, 0);
    NEED(!connect(a, (void *)&to, sizeof to) && option(a, IPPROTO_TCP, TCP_NODELAY, 1));
    if (s->cell.unread == MIXED) bring_up_mixed(a);
    else bring_up(a);
    if (is_stuck()) narrow(a, 50000);
    s->own_by_ring = fill(a, bytes[s->cell.own], &s->own_sent);
    s->own_done = 1;
    until_there(a);
    if (s->cell.peer == OURS) NEED(!shutdown(a, SHUT_RDWR));
    return a;
}

/* ---- after the leaving ---- */

static FILE *file;
static int its_pipe[2] = {-1, -1};

static long take_file(char *buf, long n) {
    static int kept;
    if (kept) return errno = kept, kept = 0, -1;
    errno = 0;
    long k = (long)fread(buf, 1, (size_t)n, file);
    int e = ferror(file) ? errno : 0;
    clearerr(file);
    if (k) kept = e;
    return k || !e ? k : (errno = e, -1);
}

static long take_spliced(int fd, char *buf, long n) {
    long k = splice(fd, 0, its_pipe[1], 0, (size_t)n, 0);
    for (long at = 0, r; at < k; at += r) NEED((r = read(its_pipe[0], buf + at, (size_t)(k - at))) > 0);
    return k;
}

static long take(int fd, char *buf, long n) {
    if (file) return take_file(buf, n);
    if (its_pipe[0] >= 0) return take_spliced(fd, buf, n);
    return fd ? recv(fd, buf, (size_t)n, 0) : read(fd, buf, (size_t)n);
}

static int right(const char *buf, long k) {
    for (long i = 0; i < k; i++)
        if (buf[i] != pattern(s->at + i)) return say(", WRONG BYTE"), 0;
    s->at += k;
    return 1;
}

/* Reads up to `end`: 1, or 0 and why not. */
static int take_to(int fd, long end, long *why) {
    static char buf[CHUNK];
    while (s->at < end) {
        long want = end - s->at < CHUNK ? end - s->at : CHUNK, before = waits();
        *why = take(fd, buf, want);
        used(before);
        if (*why <= 0 || !right(buf, *why)) return 0;
    }
    return 1;
}

static void say_end(long r) {
    if (r < 0) say(", %s", strerrorname_np(errno));
    else say(r ? ", NO END" : ", end");
}

/* All that was unread; of some of it only what there is, but no clean end before that is all. */
static int take_unread(int fd) {
    int there = 0, small = s->cell.unread <= SOME;
    long why = 0;
    for (int k = 0; small && !s->at && k < 2000 && there < s->sent; k++, sleep_us(500)) {
        long before = waits();
        NEED(!ioctl(fd, FIONREAD, &there));
        used(before);
    }
    if (small && !s->at) say(", there %d", there);
    int all = take_to(fd, s->sent, &why);
    int e = errno;
    if (may_lose()) return say(all || why < 0 || s->out != OUT ? ", a prefix" : ", EARLY END"), 0;
    if (all) return say(", read all"), 1;
    say(small ? ", READ %ld" : ", READ A PART", s->at);
    errno = e;
    say_end(why);
    return 0;
}

static void until_reset(int fd) {
    for (int k = 0; k < 1000 && info(fd).tcpi_state != CLOSE; k++) sleep_us(1000);
    sleep_us(1000);
}

static void after_gone(int fd) {
    char c;
    int e = -1;
    socklen_t n = sizeof e;
    for (int k = 0; k < 2; k++, until_reset(fd)) say_result("reply", send_pattern(fd, 0, REPLY));
    say_end(take(fd, &c, 1));
    NEED(!getsockopt(fd, SOL_SOCKET, SO_ERROR, &e, &n));
    say(", SO_ERROR %s", e ? strerrorname_np(e) : "0");
}

static void exchange(int fd) {
    long why = 0;
    wake_peer();
    for (int k = 0, n = 0; s->cell.way == ASYNC && k < 2000 && n < MORE; k++, sleep_us(500)) ioctl(fd, FIONREAD, &n); /* (a wait takes no SIGIO) */
    int all = take_to(fd, s->sent + MORE, &why);
    say(all ? ", more" : ", MORE %ld", s->at - s->sent);
    if (!all) say_end(why);
    say_result("reply", send_pattern(fd, s->own_sent + s->out, REPLY));
}

/* What the process does that has the connection now. */
static void use(int fd) {
    char c;
    int all = take_unread(fd);
    if (s->cell.peer == HALF || s->cell.peer == OURS || (is_deaf() && all)) say_end(take(fd, &c, 1));
    s->go = 1;
    if (is_deaf() && !may_lose()) after_gone(fd);
    if (s->cell.peer == HALF || s->cell.peer == OURS) say_result("reply", send_pattern(fd, s->own_sent + s->out, REPLY));
    if (goes_on()) exchange(fd), say_end(take(fd, &c, 1));
    if (s->cell.way == ASYNC && goes_on()) say(sigios ? ", SIGIO" : ", NO SIGIO");
    if (file) fclose(file);
    else close(fd);
}

static _Noreturn void finish(void) {
    int status = end_of_peer();
    if (!is_gone()) say(", peer %s", status ? WIFSIGNALED(status) ? "CRASHES" : s->peer_says : "ok");
    exit(0);
}

/* ---- ways to leave ---- */

static void begin(void) { s->began = now_us(), s->waited = waits(); }
static void left(void) { s->took = now_us() - s->began, add_waits(s->waited); }

static void wait_ok(pid_t child) {
    int status = -1;
    NEED(waitpid(child, &status, 0) == child);
    if (status) say(", CHILD %x", status);
}

static void execute(int fd, int mem, int bare, int whole) {
    char of[2][16];
    sprintf(of[0], "%d", fd), sprintf(of[1], "%d", mem);
    if (bare) unsetenv("LD_PRELOAD");
    s->waited = waits();
    execl("/proc/self/exe", "departures", "--use", of[0], of[1], whole ? "whole" : "part", (char *)0);
    NEED(0);
}

static void execute_in_child(int fd, int mem, int bare, int kept) {
    long before = waits();
    pid_t child = fork();
    if (!child) execute(fd, mem, bare, 0);
    add_waits(before);
    if (!kept) close(fd);
    wait_ok(child);
    if (kept) close(fd);
    finish();
}

static void run_true(int way) {
    char *argv[] = {"true", 0}, line[8] = "";
    pid_t child;
    if (way == SYSTEM) return say_result("system", system("true"));
    if (way == POPEN) {
        FILE *f = popen("echo hi", "r");
        left();
        NEED(f && fgets(line, sizeof line, f) && !strcmp(line, "hi\n"));
        return say_result("pclose", pclose(f));
    }
    if (way == SPAWN) NEED(!posix_spawn(&child, "/bin/true", 0, 0, argv, environ));
    else if (!(child = vfork()))
        execv("/bin/true", argv), _exit(9);
    left();
    wait_ok(child);
}

/* A process that was there before the connection. */
static int channel[2];
static pid_t receiver;
static long control[8];
static struct iovec vector;
static struct msghdr message;

static struct msghdr *part(void *at, size_t n) {
    vector = (struct iovec){at, n};
    message = (struct msghdr){.msg_iov = &vector, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    return &message;
}

static void fork_receiver(void) {
    char c;
    NEED(!socketpair(AF_UNIX, SOCK_STREAM, 0, channel));
    receiver = fork();
    if (receiver) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    NEED(recvmsg(channel[1], part(&c, 1), 0) == 1 && CMSG_FIRSTHDR(&message));
    use(*(int *)CMSG_DATA(CMSG_FIRSTHDR(&message)));
    _exit(0);
}

static void pass_on(int fd) {
    struct cmsghdr *h = CMSG_FIRSTHDR(part("c", 1));
    message.msg_controllen = CMSG_SPACE(sizeof fd);
    h->cmsg_level = SOL_SOCKET, h->cmsg_type = SCM_RIGHTS, h->cmsg_len = CMSG_LEN(sizeof fd);
    *(int *)CMSG_DATA(h) = fd;
    NEED(sendmsg(channel[0], &message, 0) == 1);
    left(), close(fd), wait_ok(receiver);
    finish();
}

static void spliced(int fd) {
    char buf[1000];
    NEED(!pipe(its_pipe));
    if (!s->sent && goes_on()) return; /* (it would wait) */
    long k = splice(fd, 0, its_pipe[1], 0, sizeof buf, SPLICE_F_NONBLOCK);
    left();
    say_result("splice", k);
    if (k > 0 && read(its_pipe[0], buf, sizeof buf) == k) right(buf, k);
}

static void low_water(int fd) {
    char buf[700];
    struct pollfd p = {fd, POLLIN, 0};
    NEED(option(fd, SOL_SOCKET, SO_RCVLOWAT, 500));
    left();
    NEED(poll(&p, 1, 0) >= 0);
    say(", poll %x", p.revents);
    long k = recv(fd, buf, sizeof buf, MSG_DONTWAIT);
    say_result("recv", k);
    if (k > 0) right(buf, k);
    NEED(option(fd, SOL_SOCKET, SO_RCVLOWAT, 1)); /* (for fewer bytes at the end no one is woken, however few were asked for) */
}

static void in_queue(int fd) {
    char buf[500];
    NEED(option(fd, IPPROTO_TCP, TCP_INQ, 1));
    left();
    long k = recvmsg(fd, part(buf, sizeof buf), MSG_DONTWAIT);
    say_result("recvmsg", k);
    if (k < 0) return;
    right(buf, k);
    struct cmsghdr *h = CMSG_FIRSTHDR(&message);
    if (!h || h->cmsg_level != IPPROTO_TCP || h->cmsg_type != TCP_CM_INQ) return say(", NO TCP_INQ");
    int n = *(int *)CMSG_DATA(h);
    say(s->cell.unread <= SOME ? ", TCP_INQ %d" : n ? ", TCP_INQ more" : ", TCP_INQ NOTHING", n);
}

static void written(int fd) {
    char buf[OUT + 1] = "";
    off_t from = 0;
    int m = memfd_create("out", 0), by_printf = s->cell.way == DPRINTF;
    for (int i = 0; i < OUT; i++) buf[i] = pattern(s->own_sent + i);
    NEED(write(m, buf, OUT) == OUT);
    begin();
    long r = by_printf ? dprintf(fd, "%s", buf) : sendfile(fd, m, &from, OUT);
    left();
    say_result(by_printf ? "dprintf" : "sendfile", r);
    s->out = r > 0 ? r : 0;
    if (is_deaf()) until_reset(fd);
}

static void count_sigio(int signal) { sigios += signal == SIGIO; }

static void owned(int fd) {
    struct sigaction a = {.sa_handler = count_sigio, .sa_flags = SA_RESTART};
    NEED(!sigaction(SIGIO, &a, 0) && !fcntl(fd, F_SETOWN, getpid()) && !fcntl(fd, F_SETFL, O_ASYNC));
}

static void leave(int fd, int mem) {
    int way = s->cell.way;
    begin();
    switch (way) {
    case DUP2: NEED(!dup2(fd, 0)); break;
    case FORK_EXEC ... FORK_EXEC_BARE_KEPT: execute_in_child(fd, mem, way >= FORK_EXEC_BARE, (way - FORK_EXEC) % 2); break;
    case EXEC ... EXEC_BARE: execute(fd, mem, way == EXEC_BARE, 1); break;
    case RIGHTS: pass_on(fd); break;
    case SPLICE: spliced(fd); break;
    case LOWAT: low_water(fd); break;
    case INQ: in_queue(fd); break;
    case FDOPEN: NEED((file = fdopen(fd, "r+"))); break;
    case DPRINTF ... SENDFILE: written(fd); break;
    case ASYNC: owned(fd); break;
    default: run_true(way);
    }
    if (!s->took) left();
    if (way == DUP2) close(fd);
    use(way == DUP2 ? 0 : fd);
    finish();
}

/* ---- all cells ---- */

static struct shared *map(int mem) { return mmap(0, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED, mem, 0); }

static const char *name(const struct cell *c) {
    static char n[100];
    snprintf(n, sizeof n, "/%s/%s/unread-%s/own-%s/", ways[c->way], peers[c->peer], amounts[c->unread], amounts[c->own]);
    return n;
}

static int is_wanted(const struct cell *c, char **filters) {
    const char *n = name(c);
    for (; *filters; filters++)
        if (**filters == '!' ? !!strstr(n, *filters + 1) : !strstr(n, *filters)) return 0;
    /* With own bytes, fewer amounts are unread. What is stuck cannot be followed by more, nor stay so when the peer goes. */
    if (c->own == ONE || c->own == OVER || c->own == MIXED || (c->own && c->unread != NONE && c->unread != SOME)) return 0;
    /* Who has shut both directions down answers what comes then with a reset; no one knows how many bytes that drops. */
    if ((c->peer == OURS && c->unread >= FULL) || (c->peer == BOTH && c->own >= FULL)) return 0;
    return c->own != STUCK || (!writes(c->way) && c->peer < CLOSED);
}

static struct run {
    struct cell cell;
    struct shared *s;
    pid_t pid;
    int done;
    long since;
    char says[40];
} runs[WAYS * PEERS * AMOUNTS * AMOUNTS];

static void start(struct run *r) {
    char m[16];
    int mem = memfd_create("departures", MFD_CLOEXEC);
    NEED(mem >= 0 && !ftruncate(mem, sizeof *r->s));
    r->s = map(mem), r->s->cell = r->cell, r->since = now_us();
    fflush(stdout);
    NEED((r->pid = fork()) >= 0);
    if (!r->pid) {
        sprintf(m, "%d", mem);
        prctl(PR_SET_PDEATHSIG, SIGKILL), setpgid(0, 0), fcntl(mem, F_SETFD, 0);
        execl("/proc/self/exe", "departures", "--cell", m, (char *)0);
        _exit(1);
    }
    close(mem);
}

/* Has it ended? It is ended if it hangs. */
static int ended(struct run *r) {
    int status = 0, hangs = now_us() - r->since > HANG_MS * 1000L;
    if (hangs) kill(-r->pid, SIGKILL);
    if (waitpid(r->pid, &status, hangs ? 0 : WNOHANG) != r->pid) return 0;
    kill(-r->pid, SIGKILL);
    if (hangs) strcpy(r->says, ", HANGS");
    else if (WIFSIGNALED(status)) sprintf(r->says, ", CRASHES %d", WTERMSIG(status));
    else if (status) sprintf(r->says, ", EXITS %d", WEXITSTATUS(status));
    return r->done = 1;
}

static void run_all(int n) {
    int most = getenv("AT_ONCE") ? atoi(getenv("AT_ONCE")) : 8;
    for (int first = 0, next = 0, running = 0; first < n;) {
        while (next < n && running < most) start(&runs[next++]), running++;
        for (int k = first; k < next; k++)
            if (!runs[k].done && ended(&runs[k])) running--;
        for (; first < next && runs[first].done; first++) {
            const struct shared *of = runs[first].s;
            printf("%s:%s%s%s\n", name(&of->cell), *of->line ? of->line + 1 : "", runs[first].says, of->lane || is_bare() ? "" : ", NOT ON A LANE");
        }
        sleep_us(1000);
    }
}

int main(int argc, char **argv) {
    signal(SIGPIPE, SIG_IGN);
    if (argc == 3 && !strcmp(argv[1], "--serve")) serve(argv[2]);
    if (argc == 4 && !strcmp(argv[1], "--other")) serve_one(atoi(argv[2]), argv[3]);
    if (argc == 3 && !strcmp(argv[1], "--cell")) {
        s = map(atoi(argv[2]));
        if (s->cell.way == RIGHTS) fork_receiver();
        leave(prepared(), atoi(argv[2]));
    }
    if (argc == 5 && !strcmp(argv[1], "--use")) {
        s = map(atoi(argv[3])), left();
        use(atoi(argv[2]));
        if (!strcmp(argv[4], "whole")) finish();
        return 0;
    }
    int every = getenv("EVERY") ? atoi(getenv("EVERY")) : 1, all = 0;
    int n = 0, lanes = 0, rings = 0, unread = 0, bad = 0, slowest = 0, most = 0;
    for (int k = 0; k < WAYS * AMOUNTS * AMOUNTS * PEERS; k++) {
        struct cell c = {k / PEERS / AMOUNTS / AMOUNTS, k % PEERS, k / PEERS / AMOUNTS % AMOUNTS, k / PEERS % AMOUNTS};
        if (is_wanted(&c, argv + 1) && all++ % every == 0) runs[n++].cell = c;
    }
    run_all(n);
    for (int k = 0; k < n; k++) {
        struct shared *of = runs[k].s;
        lanes += of->lane, rings += of->by_ring + of->own_by_ring, unread += !!of->cell.unread + !!of->cell.own;
        bad |= *runs[k].says || (!of->lane && !is_bare());
        if (of->took > runs[slowest].s->took) slowest = k;
        if (of->waits > runs[most].s->waits) most = k;
    }
    if (!n) return 1;
    fprintf(stderr, "cells %d, on a lane %d, unread bytes on %d rings of %d, slowest leaving %ld ms (%s), ", n, lanes, rings, unread,
            runs[slowest].s->took / 1000, name(&runs[slowest].cell));
    fprintf(stderr, "most waits %ld (%s)\n", runs[most].s->waits, name(&runs[most].cell));
    return bad;
}
