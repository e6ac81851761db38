/* A peer takes the last bytes from its ring and exits, without another call on the connection, while the other end leaves its
 * lane: that end is told a clean end.
 *
 *     exiting ROUNDS
 *
 * A tracer stops the leaving end before it puts its frame, or what follows the frame, on TCP; there it stays until the peer is
 * about to exit, and a bit longer. Prints "result ok".
 */
#define _GNU_SOURCE
#include "pairs.h"
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>
#include <linux/ptrace.h>

enum { MOST = 4000, BIT_US = 3000, LATE_MS = 40 };

static struct shared {
    volatile int traces, traced, left, untraced; /* the leaving end's, and its tracer's */
    volatile int fd, at, late;
    volatile int ready, go, ends; /* the peer's */
} *s;
static char buf[MOST];

static long now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* The byte 'w' there and back, until it is another one; then all that follows, and the end. */
static void peer(int n, int way) {
    char c;
    int b = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(listener);
    NEED(!connect(b, (void *)&address, sizeof address));
    NEED(!setsockopt(b, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one));
    do NEED(recv(b, &c, 1, 0) == 1 && (c != 'w' || send(b, &c, 1, 0) == 1));
    while (c == 'w');
    s->ready = 1;
    while (!s->go) sleep_us(100);
    NEED(recv(b, buf, (size_t)n, MSG_WAITALL) == n);
    for (int k = 0; k < n; k++) NEED(buf[k] == (char)k);
    s->ends = 1;
    if (way) exit(0);
    _exit(0);
}

/* The leaving end puts something on TCP: not before the peer ends. */
static void meanwhile(void) {
    s->go = 1;
    while (!s->ends) sleep_us(100);
    long ends = now_ms();
    sleep_us(BIT_US);
    s->late = now_ms() - ends > LATE_MS; /* (the peer does not wait that long) */
}

static void tracer(pid_t main) {
    struct __ptrace_syscall_info of;
    int status, sends = 0;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    while (!s->traces) sleep_us(100);
    NEED(!ptrace(PTRACE_SEIZE, main, 0, PTRACE_O_TRACESYSGOOD) && !ptrace(PTRACE_INTERRUPT, main, 0, 0));
    while (!s->left) {
        NEED(waitpid(main, &status, __WALL) == main && WIFSTOPPED(status));
        int call = WSTOPSIG(status) == (SIGTRAP | 0x80);
        if (call && ptrace(PTRACE_GET_SYSCALL_INFO, main, sizeof of, &of) > 0 && of.op == PTRACE_SYSCALL_INFO_ENTRY)
            if (of.entry.nr == SYS_sendto && (int)of.entry.args[0] == s->fd && sends++ == s->at) meanwhile();
        s->traced = 1;
        NEED(!ptrace(PTRACE_SYSCALL, main, 0, call || status >> 16 ? 0 : WSTOPSIG(status)));
    }
    NEED(!ptrace(PTRACE_INTERRUPT, main, 0, 0) && waitpid(main, &status, __WALL) == main);
    NEED(!ptrace(PTRACE_DETACH, main, 0, 0));
    s->go = 1; /* (bare, nothing is sent) */
    s->untraced = 1;
    _exit(0);
}

static void until_on_lane(int a) {
    int bare = !getenv("LD_PRELOAD");
    char c;
    for (int tries = 0;; tries++) {
        struct tcp_info before = info(a);
        NEED(send(a, "w", 1, 0) == 1 && recv(a, &c, 1, 0) == 1);
        struct tcp_info now = info(a);
        if (bare ? tries > 3 : now.tcpi_bytes_received == before.tcpi_bytes_received && now.tcpi_bytes_sent == before.tcpi_bytes_sent) return;
        NEED(tries < 20000);
        if (tries % 8 == 7) sleep_us(500);
    }
}

int main(int argc, char **argv) {
    NEED(argc == 2);
    int judged = 0, rounds = atoi(argv[1]);
    socklen_t len = sizeof address;
    s = mmap(0, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    address.sin_family = AF_INET, address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    listener = socket(AF_INET, SOCK_STREAM, 0);
    NEED(!bind(listener, (void *)&address, len) && !listen(listener, 5) && !getsockname(listener, (void *)&address, &len));
    for (int k = 0; k < MOST; k++) buf[k] = (char)k;
    for (int turn = 0; turn < rounds; turn++) {
        int n = turn % 3 ? MOST : 1, on = 1, told = -1, status;
        memset(s, 0, sizeof *s);
        s->at = turn & 1;
        pid_t self = getpid(), p = fork();
        if (!p) peer(n, turn / 2 & 1);
        pid_t t = fork();
        if (!t) tracer(self);
        prctl(PR_SET_PTRACER, t);
        int a = s->fd = accept(listener, 0, 0);
        NEED(a >= 0 && !setsockopt(a, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on));
        until_on_lane(a);
        NEED(send(a, "l", 1, 0) == 1);
        while (!s->ready) sleep_us(100);
        NEED(send(a, buf, (size_t)n, MSG_DONTWAIT) == n);
        s->traces = 1;
        while (!s->traced) getppid();
        NEED(!setsockopt(a, SOL_SOCKET, SO_TIMESTAMP, &on, sizeof on)); /* no lane has this */
        s->left = 1;
        while (!s->untraced) getppid();
        int got = (int)recv(a, &told, 1, 0), reset = got < 0 && errno == ECONNRESET;
        len = sizeof told;
        NEED(!getsockopt(a, SOL_SOCKET, SO_ERROR, &told, &len) && (got == 0 || reset));
        judged += !s->late;
        NEED(s->late || (got == 0 && !told));
        NEED(waitpid(t, &status, 0) == t && !status && waitpid(p, &status, 0) == p && !status);
        close(a);
    }
    NEED(judged > rounds / 4);
    puts("result ok");
    return 0;
}
