/* One call with which all connections leave their lanes, while this process has so many to a peer that does nothing: all of
 * them survive it with every byte, and the thread waits no more often than a few times, however many they are.
 *
 *     many N PEERS HOW WAY
 *
 * PEERS processes share the connections. HOW: asleep, stopped, hostile (it never reads again). WAY: system, popen, spawn,
 * fork; rights: one sendmmsg with the descriptors of all; unshare: a table of descriptors of its own. Each end of each
 * connection has bytes of the other's unread. Prints "lanes N waits N ms N" and "result ok".
 */
#define _GNU_SOURCE
#include "pairs.h"
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <linux/futex.h>
#include <linux/ptrace.h>

enum { AMOUNT = 2000, HUGE_AMOUNT = 200000, MORE = 100, MOST = 4000, PEERS = 8 };

static volatile struct shared {
    int traces, traced, done, untraced; /* the tracer's */
    int waits;
    int sent, go; /* the peers' */
} *s;

static char pattern(int conn, int i) { return (char)(conn * 31 + i * 7); }

static void send_all(int fd, int conn, int from, int n) {
    static char buf[HUGE_AMOUNT];
    for (int i = 0; i < n; i++) buf[i] = pattern(conn, from + i);
    for (int at = 0, k; at < n; at += k) NEED((k = (int)send(fd, buf + at, (size_t)(n - at), MSG_NOSIGNAL)) > 0);
}

static void take_all(int fd, int conn, int from, int n) {
    static char buf[HUGE_AMOUNT];
    NEED(recv(fd, buf, (size_t)n, MSG_WAITALL) == n);
    for (int i = 0; i < n; i++) NEED(buf[i] == pattern(conn, from + i));
}

/* ---- the system calls of the main thread that wait ---- */

static int waits_for(pid_t pid, const struct __ptrace_syscall_info *of) {
    errno = 0;
    switch (of->entry.nr) {
    case SYS_ppoll: return !of->entry.args[2] || ptrace(PTRACE_PEEKDATA, pid, of->entry.args[2], 0) || ptrace(PTRACE_PEEKDATA, pid, of->entry.args[2] + 8, 0);
    case SYS_futex: return (of->entry.args[1] & FUTEX_CMD_MASK) == FUTEX_WAIT || (of->entry.args[1] & FUTEX_CMD_MASK) == FUTEX_WAIT_BITSET;
    case SYS_epoll_pwait: return of->entry.args[3] != 0;
#ifdef __x86_64__
    case SYS_poll: return of->entry.args[2] != 0;
    case SYS_epoll_wait: return of->entry.args[3] != 0;
    case SYS_select:
#endif
    case SYS_pselect6:
    case SYS_nanosleep:
    case SYS_clock_nanosleep: return 1;
    default: return 0;
    }
}

/* One stop of a traced process; true: it goes on untraced. */
static int stopped(pid_t pid, int status) {
    struct __ptrace_syscall_info of = {0};
    int signal = WSTOPSIG(status), event = status >> 16, call = signal == (SIGTRAP | 0x80);
    if (event == PTRACE_EVENT_EXEC) return !ptrace(PTRACE_DETACH, pid, 0, 0);
    if (call && ptrace(PTRACE_GET_SYSCALL_INFO, pid, sizeof of, &of) > 0 && of.op == PTRACE_SYSCALL_INFO_ENTRY && s->traced)
        s->waits += waits_for(pid, &of);
    s->traced = 1;
    ptrace(PTRACE_SYSCALL, pid, 0, event || call ? 0 : signal);
    return 0;
}

/* A child that traces its parent, and what that forks until it executes a program. */
static void start_tracer(void) {
    pid_t main = getpid(), child = fork(), pid;
    int status;
    if (child) return (void)prctl(PR_SET_PTRACER, child);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    while (!s->traces) sleep_us(1000);
    int how = PTRACE_O_TRACESYSGOOD | PTRACE_O_TRACEFORK | PTRACE_O_TRACEEXEC;
    NEED(!ptrace(PTRACE_SEIZE, main, 0, how) && !ptrace(PTRACE_INTERRUPT, main, 0, 0));
    while (!s->done) {
        NEED((pid = waitpid(-1, &status, __WALL)) > 0);
        if (WIFSTOPPED(status)) stopped(pid, status);
    }
    NEED(!ptrace(PTRACE_INTERRUPT, main, 0, 0) && waitpid(main, &status, __WALL) == main);
    NEED(!ptrace(PTRACE_DETACH, main, 0, 0));
    s->untraced = 1;
    _exit(0);
}

/* ---- the peers ---- */

static int own_bytes(const char *how, int n) { return !strcmp(how, "hostile") && n <= 10 ? HUGE_AMOUNT : AMOUNT; }

static void peer(int n, const char *how, int own) {
    static int fds[MOST];
    char c;
    for (int k = 0; k < n; k++) NEED((fds[k] = accept(listener, 0, 0)) >= 0);
    for (;;) { /* a byte there and back on each, until it is told to go on */
        int ended = 0;
        for (int k = 0; k < n; k++) {
            NEED(recv(fds[k], &c, 1, 0) == 1);
            if (c == 'g') ended++;
            else NEED(send(fds[k], &c, 1, 0) == 1);
        }
        if (ended) break;
    }
    for (int k = 0; k < n; k++) send_all(fds[k], k, 0, AMOUNT);
    __sync_fetch_and_add(&s->sent, 1);
    if (!strcmp(how, "stopped")) raise(SIGSTOP);
    while (!s->go) sleep_us(1000);
    if (!strcmp(how, "hostile"))
        for (;;) pause();
    for (int k = 0; k < n; k++) {
        take_all(fds[k], k, 0, own + MORE);
        send_all(fds[k], k, AMOUNT, MORE);
    }
    for (int k = 0; k < n; k++) {
        NEED(recv(fds[k], &c, 1, 0) == 0);
        close(fds[k]);
    }
    _exit(0);
}

/* ---- the process whose connections leave ---- */

enum { FDS = 253, MESSAGES = (MOST + FDS - 1) / FDS }; /* the kernel's limit for one message */

static void hand_over(const int *fds, int n) {
    static union {
        struct cmsghdr header;
        char room[CMSG_SPACE(FDS * sizeof(int))];
    } control[MESSAGES];
    static struct mmsghdr messages[MESSAGES];
    struct iovec v = {"x", 1};
    int pair[2], k = 0;
    NEED(!socketpair(AF_UNIX, SOCK_DGRAM, 0, pair));
    for (int at = 0; at < n; at += FDS, k++) {
        size_t bytes = sizeof(int) * (size_t)(n - at < FDS ? n - at : FDS);
        messages[k].msg_hdr = (struct msghdr){.msg_iov = &v, .msg_iovlen = 1, .msg_control = &control[k], .msg_controllen = CMSG_SPACE(bytes)};
        control[k].header = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(bytes)};
        memcpy(CMSG_DATA(&control[k].header), fds + at, bytes);
    }
    NEED(sendmmsg(pair[0], messages, (unsigned)k, 0) == k);
    close(pair[0]), close(pair[1]);
}

static pthread_t other;
static volatile int others;

static void *idle(void *_) {
    while (others) sleep_us(1000);
    return _;
}

/* (Who has one thread shares the table with nobody.) */
static void part(void) {
    others = 1;
    NEED(!pthread_create(&other, 0, idle, 0) && !unshare(CLONE_FILES));
}

static void start(const char *way, const int *fds, int n) {
    char *argv[] = {"true", 0};
    int status = -1;
    pid_t child = 0;
    if (!strcmp(way, "system")) NEED(system("true") == 0);
    else if (!strcmp(way, "popen")) NEED(pclose(popen("true", "r")) == 0);
    else if (!strcmp(way, "rights")) hand_over(fds, n);
    else if (!strcmp(way, "unshare")) part();
    else {
        if (!strcmp(way, "spawn")) NEED(!posix_spawn(&child, "/bin/true", 0, 0, argv, environ));
        else if (!(child = fork())) execv("/bin/true", argv), _exit(9);
        NEED(waitpid(child, &status, 0) == child && status == 0);
    }
}

static long now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* How many of them are on lanes, both ways? */
static int on_lanes(const int *fds, int n) {
    int lanes = 0;
    char c;
    for (int k = 0; k < n; k++) {
        struct tcp_info before = info(fds[k]);
        NEED(send(fds[k], "w", 1, 0) == 1 && recv(fds[k], &c, 1, 0) == 1 && c == 'w');
        struct tcp_info now = info(fds[k]);
        lanes += now.tcpi_bytes_received == before.tcpi_bytes_received && now.tcpi_bytes_sent == before.tcpi_bytes_sent;
    }
    return lanes;
}

int main(int argc, char **argv) {
    static int fds[MOST];
    static pid_t pids[PEERS];
    static struct sockaddr_in at[PEERS];
    NEED(argc == 5);
    int n = atoi(argv[1]), peers = atoi(argv[2]), each = n / peers, bare = !getenv("LD_PRELOAD"), lanes = 0, status;
    const char *how = argv[3];
    int own = own_bytes(how, n), hostile = !strcmp(how, "hostile");
    socklen_t len = sizeof address;
    NEED(each * peers == n && n <= MOST && peers <= PEERS);
    s = mmap(0, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    start_tracer();
    address.sin_family = AF_INET, address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    for (int p = 0; p < peers; p++) { /* (all are forked before there is a connection, of which they would have a copy) */
        address.sin_port = 0;
        listener = socket(AF_INET, SOCK_STREAM, 0);
        NEED(!bind(listener, (void *)&address, len) && !listen(listener, each));
        getsockname(listener, (void *)&address, &len);
        if (!(pids[p] = fork())) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            peer(each, how, own);
        }
        close(listener);
        at[p] = address;
    }
    for (int k = 0; k < n; k++) {
        fds[k] = socket(AF_INET, SOCK_STREAM, 0);
        NEED(!connect(fds[k], (void *)&at[k / each], len));
    }
    for (long k = 0, until = now_ms() + 60000; lanes < n && (bare ? k < 2 : now_ms() < until); k++) {
        if (k > 3) sleep_us(5000);
        lanes = on_lanes(fds, n);
    }
    for (int k = 0; k < n; k++) NEED(send(fds[k], "g", 1, 0) == 1);
    for (int k = 0; k < n; k++) send_all(fds[k], k % each, 0, own);
    while (s->sent < peers) sleep_us(1000);
    for (int p = 0; p < peers && !strcmp(how, "stopped"); p++) NEED(waitpid(pids[p], &status, WUNTRACED) == pids[p] && WIFSTOPPED(status));
    sleep_us(50000);

    s->traces = 1;
    while (!s->traced) getppid();
    long began = now_ms();
    start(argv[4], fds, n);
    long took = now_ms() - began;
    s->done = 1;
    while (!s->untraced) getppid();
    if (others) { /* (it has a copy of each) */
        others = 0;
        NEED(!pthread_join(other, 0));
    }
    printf("lanes %d waits %d ms %ld\n", lanes, s->waits, took);
    fflush(stdout);

    for (int k = 0; k < n; k++) take_all(fds[k], k % each, 0, AMOUNT);
    s->go = 1;
    for (int p = 0; p < peers; p++) kill(pids[p], SIGCONT);
    for (int k = 0; k < n && !hostile; k++) {
        send_all(fds[k], k % each, own, MORE);
        take_all(fds[k], k % each, AMOUNT, MORE);
    }
    for (int k = 0; k < n; k++) close(fds[k]);
    for (int p = 0; p < peers; p++) {
        if (hostile) kill(pids[p], SIGKILL);
        NEED(waitpid(pids[p], &status, 0) == pids[p] && (hostile || !status));
    }
    puts("result ok");
}
