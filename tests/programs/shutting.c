/* An end shuts its directions down, with bytes unread, beside a peer that does nothing or never ends: for others of its
 * process that is done in no time, and what is unread is read.
 *
 *     shutting reads ROUNDS     another thread reads meanwhile
 *     shutting reused ROUNDS    another thread closes the number meanwhile, and accepts a connection by it
 *     shutting full ROUNDS      more is unread than TCP has room for; the quickest takes less than 150 ms
 *     shutting many COUNT       so many connections, of which one after the other is shut down, take less than two seconds
 *     shutting late COUNT       so many at once, which leave their lanes then, and are read
 *
 *     shutting once COUNT       so many, of which one after the other is shut down; all but the first leave their lanes then
 *
 * The last three print "ready", and go on with SIGUSR1; the last one says "first" when the daemon, which was stopped until
 * then, was waited for in vain.
 *
 * Prints "result ok".
 */
#define _GNU_SOURCE
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "pairs.h"

#define MOST 8000
extern char **environ;
static char buf[1 << 16];
static unsigned seed = 1;
static long *sent; /* by the peer, when it stops */
static int accepted[100], all; /* which a peer that is made later has as well */

static unsigned any(unsigned n) {
    seed = seed * 1103515245 + 12345;
    return (seed >> 16) % n;
}

static long now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

static char byte_at(long at) { return (char)(at * 7 + at / 251); }

static int bare(void) { return !getenv("LD_PRELOAD"); }

/* The next bytes of the stream. */
static void put(int fd, long n) {
    for (long k = 0; k < n; k++) buf[k] = byte_at(*sent + k);
    NEED(send(fd, buf, n, MSG_NOSIGNAL) == n);
    *sent += n;
}

/* Sends so many bytes and does nothing more; or sends for ever. */
static void peer(int fd, long bytes) {
    char c = 0;
    while (c != 'g') NEED(recv(fd, &c, 1, 0) == 1 && (c == 'g' || send(fd, &c, 1, 0) == 1));
    if (!bytes)
        while (send(fd, buf, sizeof buf, MSG_NOSIGNAL) > 0) {}
    else {
        put(fd, bytes);
        raise(SIGSTOP);
    }
    _exit(0);
}

static pid_t dial_peer(int *fd, long bytes) {
    socklen_t n = sizeof address;
    pid_t p;
    *sent = 0;
    NEED((p = fork()) >= 0);
    if (!p) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        while (all) close(accepted[--all]);
        int s = socket(AF_INET, SOCK_STREAM, 0);
        NEED(!connect(s, (void *)&address, n));
        peer(s, bytes);
    }
    *fd = accept(listener, 0, 0);
    NEED(*fd >= 0);
    accepted[all++] = *fd;
    return p;
}

static void go(int fd) {
    char c;
    for (int k = 0;; k++) {
        struct tcp_info before = info(fd);
        NEED(send(fd, "w", 1, 0) == 1 && recv(fd, &c, 1, 0) == 1);
        sleep_us(500);
        struct tcp_info now = info(fd);
        if (bare() ? k > 2 : now.tcpi_bytes_received == before.tcpi_bytes_received && now.tcpi_bytes_acked == before.tcpi_bytes_acked) break;
        NEED(k < 5000);
    }
    NEED(send(fd, "g", 1, 0) == 1);
}

static void until_unread(int fd, long n) {
    int there = 0;
    for (int k = 0; k < 5000 && there < n; k++, sleep_us(500)) NEED(!ioctl(fd, FIONREAD, &there));
    NEED(there >= n);
}

static void until_stopped(pid_t p) {
    int status;
    NEED(waitpid(p, &status, WUNTRACED) == p && WIFSTOPPED(status));
}

/* A connection whose peer has stopped with so much unread. */
static pid_t beside_stopped(int *fd, long bytes) {
    pid_t p = dial_peer(fd, bytes);
    go(*fd);
    until_unread(*fd, bytes);
    until_stopped(p);
    return p;
}

static void gone(pid_t p, int fd) {
    NEED(!kill(p, SIGKILL) && waitpid(p, 0, 0) == p && !close(fd));
}

static void read_all(int fd, long bytes, int flags) {
    char in[MOST];
    for (long at = 0;;) {
        long n = recv(fd, in, sizeof in, flags);
        if (n < 0 && flags && errno == EAGAIN) {
            sleep_us(100);
            continue;
        }
        if (n < 0 || (!n && at != bytes)) fprintf(stderr, "%ld of %ld\n", at, bytes);
        NEED(n >= 0 && (n || at == bytes));
        if (!n) return;
        for (long k = 0; k < n; k++) NEED(in[k] == byte_at(at + k));
        at += n;
    }
}

struct shut {
    int fd, how; /* -1: a child is made instead, to which the connection is lent */
    pthread_barrier_t both;
    volatile int thread, over;
};

static void *shuts(void *arg) {
    struct shut *s = arg;
    char *argv[] = {"true", 0};
    pid_t child;
    s->thread = (int)syscall(SYS_gettid);
    pthread_barrier_wait(&s->both);
    if (s->how >= 0) NEED(!shutdown(s->fd, s->how) || errno == EBADF);
    else NEED(!posix_spawn(&child, "/bin/true", 0, 0, argv, environ) && waitpid(child, 0, 0) == child);
    s->over = 1;
    return 0;
}

/* Until the thread's call is over, or waits: then it has the connection, whatever becomes of the number. (A thread that is
 * late would shut down what has the number then, as it would without a lane.) */
static void until_in_call(struct shut *s) {
    char path[50], in[50];
    sprintf(path, "/proc/self/task/%d/syscall", s->thread);
    for (int k = 0; !s->over; k++, sleep_us(20)) {
        FILE *f = fopen(path, "re");
        int waits = f && fgets(in, sizeof in, f) && atoi(in) == SYS_ppoll && strncmp(in, "running", 7);
        if (f) fclose(f);
        if (waits) return;
        NEED(k < 500000);
    }
}

static pthread_t start(struct shut *s) {
    pthread_t t;
    NEED(!pthread_barrier_init(&s->both, 0, 2) && !pthread_create(&t, 0, shuts, s));
    pthread_barrier_wait(&s->both);
    sleep_us(any(3000));
    return t;
}

static void reads(int k) {
    struct shut s = {.how = k / 2 % 2 ? -1 : SHUT_RDWR};
    long bytes = 1 + any(MOST);
    pid_t p = beside_stopped(&s.fd, bytes);
    if (s.how < 0) NEED(!shutdown(s.fd, SHUT_RD));
    pthread_t t = start(&s);
    read_all(s.fd, bytes, k % 2 ? MSG_DONTWAIT : 0);
    NEED(!pthread_join(t, 0));
    gone(p, s.fd);
}

static void reused(int k) {
    struct shut s = {.how = k % 3 ? SHUT_RDWR : SHUT_WR};
    char c;
    pid_t p = beside_stopped(&s.fd, 1 + any(MOST));
    int other = socket(AF_INET, SOCK_STREAM, 0);
    NEED(!connect(other, (void *)&address, sizeof address));
    pthread_t t = start(&s);
    until_in_call(&s);
    NEED(!close(s.fd));
    NEED(accept(listener, 0, 0) == s.fd);
    NEED(!pthread_join(t, 0));
    for (int turn = 0; turn < 20; turn++) {
        NEED(send(other, "x", 1, MSG_NOSIGNAL) == 1 && recv(s.fd, &c, 1, 0) == 1 && c == 'x');
        NEED(send(s.fd, "y", 1, MSG_NOSIGNAL) == 1 && recv(other, &c, 1, 0) == 1 && c == 'y');
    }
    gone(p, s.fd), close(other);
}

static long full(void) {
    int fd;
    pid_t p = dial_peer(&fd, 0);
    go(fd);
    bare() ? sleep_us(30000) : until_unread(fd, 200000);
    long began = now_us();
    NEED(!shutdown(fd, SHUT_RDWR));
    long took = now_us() - began;
    gone(p, fd);
    return took;
}

static void none(int signal) { (void)signal; }

static void ready(int count, long bytes, int *fds, pid_t *p) {
    sigset_t usr1, before;
    sigemptyset(&usr1), sigaddset(&usr1, SIGUSR1);
    signal(SIGUSR1, none), sigprocmask(SIG_BLOCK, &usr1, &before);
    for (int k = 0; k < count; k++) p[k] = beside_stopped(&fds[k], bytes);
    printf("ready\n"), fflush(stdout);
    sigsuspend(&before);
}

static void late(int count) {
    int fds[count];
    pid_t p[count];
    pthread_t t[count];
    struct shut s[count], lends = {.how = -1};
    ready(count, sizeof buf, fds, p);
    for (int k = 0; k < count; k++) s[k].fd = fds[k], s[k].how = SHUT_RDWR, t[k] = start(&s[k]);
    for (int k = 0; k < count; k++) NEED(!pthread_join(t[k], 0));
    NEED(!pthread_join(start(&lends), 0));
    for (int k = 0; k < count; k++) read_all(fds[k], sizeof buf, 0), gone(p[k], fds[k]);
}

static void once(int count) {
    int fds[count];
    pid_t p[count];
    ready(count, MOST, fds, p);
    NEED(!shutdown(fds[0], SHUT_RDWR));
    printf("first\n"), fflush(stdout);
    for (int k = 1; k < count; k++) NEED(!shutdown(fds[k], SHUT_RDWR));
    read_all(fds[0], MOST, 0), gone(p[0], fds[0]);
    for (int k = 1; k < count; k++) NEED(!dup2(fds[k], 0)), read_all(0, MOST, 0), gone(p[k], fds[k]);
}

static void many(int count) {
    int fds[count];
    pid_t p[count];
    ready(count, MOST, fds, p);
    long began = now_us();
    for (int k = 0; k < count; k++) NEED(!shutdown(fds[k], SHUT_RDWR));
    long took = now_us() - began;
    fprintf(stderr, "%ld ms\n", took / 1000);
    NEED(took < 2000000); /* (for the first one the daemon is waited for) */
    for (int k = 0; k < count; k++) read_all(fds[k], MOST, 0), gone(p[k], fds[k]);
}

int main(int argc, char **argv) {
    socklen_t n = sizeof address;
    NEED(argc == 3);
    sent = mmap(0, sizeof *sent, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    listener = socket(AF_INET, SOCK_STREAM, 0);
    NEED(!bind(listener, (void *)&address, n) && !listen(listener, 100) && !getsockname(listener, (void *)&address, &n));
    alarm(110);
    long rounds = atoi(argv[2]), least = 1000000;
    if (!strcmp(argv[1], "many")) many(rounds);
    else if (!strcmp(argv[1], "late")) late(rounds);
    else if (!strcmp(argv[1], "once")) once(rounds);
    else
        for (int k = 0; k < rounds; k++, all = 0) {
            if (!strcmp(argv[1], "reads")) reads(k);
            else if (!strcmp(argv[1], "reused")) reused(k);
            else {
                long took = full();
                least = took < least ? took : least;
            }
        }
    if (!strcmp(argv[1], "full")) fprintf(stderr, "quickest %ld ms\n", least / 1000), NEED(least < 150000);
    printf("result ok\n");
    return 0;
}
