/* A thread waits in a call, beside a peer that is stopped, and is held there (traced).
 *
 *     held place      It shuts down, and meanwhile another thread makes the connection leave its lane: the lane's place is the
 *                     next connection's when the first goes on, and what it writes must not be that one's end. The next
 *                     connections are half closed by this end; their peer sends, leaves their lanes with that unread, and
 *                     sends more.
 *     held leaves     It leaves its lane, and is held for longer than such a call waits: that is no time in which others have
 *                     failed to do their part.
 *     held shuts      The same of a shutdown of both directions, after which the connection leaves its lane.
 *     held reset      Its connection is to be reset, because its peer has written into TCP below the lane, and it is held when it
 *                     says so to the daemon; meanwhile another thread closes the connection, and gets the next one, by its
 *                     number: that one is not reset.
 *     held close      It closes the connection, and waits for the locks of the lane, which another thread gives back because the
 *                     other end has left it: the lane's place is the next connection's when the first goes on, which is a
 *                     reset, for bytes are unread. The next ones are used for longer than a reset has that TCP does not bring.
 *
 * Prints "result ok".
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include "pairs.h"

enum { ROUNDS = 500, CLOSE_MS = 500, USED_MS = 1500 };
enum { UNREAD = 3000, FIRST = 2000, MORE = 1000, NEXT = 4, HELD_US = 2500000, PATIENCE_US = 20000000 };
extern char **environ;

static char mode;

static struct shared {
    volatile int thread, traced, held, release; /* the thread that shuts down, and its tracer */
    volatile int shut, left, closed;            /* what this end and its peer have done */
    volatile int number, second, given, waiting; /* the connection, and the thread that gives its lane back */
} *s;

static void until(volatile int *word) {
    for (long k = 0; !*word; k++, sleep_us(200)) NEED(k < PATIENCE_US / 200);
}

static long now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static char byte_at(int at) { return (char)(at * 7 + at / 251); }

static void put(int fd, int from, int n) {
    char buf[n];
    for (int k = 0; k < n; k++) buf[k] = byte_at(from + k);
    NEED(send(fd, buf, (size_t)n, MSG_NOSIGNAL) == n);
}

static void spawn_true(void) {
    char *argv[] = {"true", 0};
    pid_t child;
    int status;
    NEED(!posix_spawn(&child, "/bin/true", 0, 0, argv, environ) && waitpid(child, &status, 0) == child && !status);
}

/* ---- the tracer: holds the thread where it waits in its shutdown ---- */

static int waits(pid_t thread) {
    struct __ptrace_syscall_info of = {0};
    long t[2] = {0, 0};
    if (ptrace(PTRACE_GET_SYSCALL_INFO, thread, sizeof of, &of) <= 0 || of.op != PTRACE_SYSCALL_INFO_ENTRY) return 0;
    if (mode == 'r') return of.entry.nr == SYS_sendmsg;
    if (of.entry.nr != SYS_ppoll) return 0;
    for (int k = 0; of.entry.args[2] && k < 2; k++) t[k] = ptrace(PTRACE_PEEKDATA, thread, of.entry.args[2] + 8 * (unsigned)k, 0);
    return t[0] || t[1];
}

static void trace(void) {
    int status;
    until(&s->thread);
    pid_t thread = s->thread;
    NEED(!ptrace(PTRACE_SEIZE, thread, 0, PTRACE_O_TRACESYSGOOD) && !ptrace(PTRACE_INTERRUPT, thread, 0, 0));
    NEED(waitpid(thread, &status, __WALL) == thread && WIFSTOPPED(status));
    s->traced = 1;
    while (WIFSTOPPED(status) && !waits(thread)) {
        NEED(!ptrace(PTRACE_SYSCALL, thread, 0, 0));
        NEED(waitpid(thread, &status, __WALL) == thread);
    }
    NEED(WIFSTOPPED(status) || !getenv("LD_PRELOAD")); /* (bare it has ended) */
    s->held = 1;
    until(&s->release);
    NEED(!WIFSTOPPED(status) || !ptrace(PTRACE_DETACH, thread, 0, 0));
}

static struct __ptrace_syscall_info entered(pid_t thread) {
    struct __ptrace_syscall_info of = {0};
    if (ptrace(PTRACE_GET_SYSCALL_INFO, thread, sizeof of, &of) <= 0) of.op = PTRACE_SYSCALL_INFO_NONE;
    return of;
}

static void seize(pid_t thread) {
    int status;
    NEED(!ptrace(PTRACE_SEIZE, thread, 0, PTRACE_O_TRACESYSGOOD) && !ptrace(PTRACE_INTERRUPT, thread, 0, 0));
    NEED(waitpid(thread, &status, __WALL) == thread && WIFSTOPPED(status));
}

/* Until it enters this call (-1: any that receives from the connection). */
static void run_to(pid_t thread, int nr) {
    for (int status;;) {
        NEED(!ptrace(PTRACE_SYSCALL, thread, 0, 0));
        NEED(waitpid(thread, &status, __WALL) == thread && WIFSTOPPED(status));
        struct __ptrace_syscall_info of = entered(thread);
        if (of.op != PTRACE_SYSCALL_INFO_ENTRY) continue;
        int receives = (of.entry.nr == SYS_recvfrom || of.entry.nr == SYS_recvmsg) && (int)of.entry.args[0] == s->number;
        if (nr < 0 ? receives : of.entry.nr == (unsigned)nr) return;
    }
}

/* The closing thread is past the locks that mark the close, and has not looked up the lane for its end yet; the other has
 * both locks, and has not given the lane back yet; the first has looked it up, and waits; the second gives it back. */
static void trace_both(void) {
    int bare = !getenv("LD_PRELOAD");
    until(&s->second);
    if (!bare) seize(s->second);
    s->waiting = 1;
    until(&s->thread);
    if (!bare) seize(s->thread);
    s->traced = 1;
    if (!bare) run_to(s->thread, SYS_epoll_ctl);
    s->held = 1;
    if (!bare) run_to(s->second, -1), run_to(s->thread, SYS_futex), NEED(!ptrace(PTRACE_DETACH, s->second, 0, 0));
    s->given = 1;
    until(&s->release);
    NEED(bare || !ptrace(PTRACE_DETACH, s->thread, 0, 0));
}

/* ---- the peer ---- */

static int dialled(void) {
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    char c = 0;
    NEED(!connect(fd, (void *)&address, sizeof address));
    while (c != 'g') NEED(recv(fd, &c, 1, 0) == 1 && (c == 'g' || send(fd, &c, 1, 0) == 1));
    return fd;
}

static void peer(void) {
    int first = dialled(), next[NEXT];
    put(first, 0, UNREAD);
    raise(SIGSTOP);
    char c;
    for (int k = 0; k < 50; k++, sleep_us(1000)) (void)!recv(first, &c, 1, MSG_DONTWAIT); /* (it hears that the lane is given back) */
    for (int k = 0; k < NEXT; k++) next[k] = dialled();
    until(&s->shut);
    for (int k = 0; k < NEXT; k++) put(next[k], 0, FIRST);
    spawn_true();
    for (int k = 0; k < NEXT; k++) put(next[k], FIRST, MORE);
    s->left = 1;
    for (int k = 0; k < NEXT; k++) close(next[k]);
    _exit(0);
}

static void peer_that_is_reset(void) {
    int first = dialled();
    NEED(raw(SYS_write, first, (long)"foreign", 7, 0, 0) == 7);
    s->left = 1;
    int next = dialled();
    char c;
    for (int k = 0; k < ROUNDS; k++) NEED(recv(next, &c, 1, 0) == 1 && send(next, &c, 1, 0) == 1);
    _exit(0);
}

/* Echoes what comes, on each in turn, until they end. */
static void echo(const int *fds, int n) {
    char c;
    for (int j = 0;; j = (j + 1) % n) {
        long got = recv(fds[j], &c, 1, 0);
        if (!got) return;
        NEED(got == 1 && send(fds[j], &c, 1, MSG_NOSIGNAL) == 1);
    }
}

static void peer_that_leaves(void) {
    int first = dialled(), next[NEXT];
    put(first, 0, UNREAD);
    until(&s->held);
    spawn_true();
    until(&s->given);
    for (int k = 0; k < NEXT; k++) next[k] = dialled();
    echo(next, NEXT);
    _exit(0);
}

/* Ends the wait of the thread that gives the lane back, once it has. */
static void peer_that_wakes(void) {
    until(&s->number);
    int fd = dialled();
    until(&s->given);
    NEED(send(fd, "x", 1, 0) == 1);
    _exit(0);
}

/* ---- this end ---- */

/* Accepts a connection, and uses it until it is on a lane. */
static int accepted(void) {
    char c;
    int fd = accept(listener, 0, 0), bare = !getenv("LD_PRELOAD");
    NEED(fd >= 0);
    for (int k = 0;; k++, sleep_us(500)) {
        struct tcp_info before = info(fd);
        NEED(send(fd, "w", 1, 0) == 1 && recv(fd, &c, 1, 0) == 1 && k < 20000);
        struct tcp_info now = info(fd);
        if (bare ? k > 2 : now.tcpi_bytes_received == before.tcpi_bytes_received && now.tcpi_bytes_acked == before.tcpi_bytes_acked) break;
    }
    NEED(send(fd, "g", 1, 0) == 1);
    return fd;
}

static void *held(void *arg) {
    int fd = *(int *)arg;
    s->thread = (int)syscall(SYS_gettid);
    until(&s->traced);
    char c;
    if (mode == 'c') NEED(!close(fd));
    else if (mode == 'r')
        while (recv(fd, &c, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN) {}
    else if (mode == 'l') NEED(!dup2(fd, 0));
    else NEED(!shutdown(fd, SHUT_RDWR));
    return 0;
}

/* `end`: and then there is nothing more. */
static void read_all(int fd, int all, int end) {
    char buf[all + 1];
    int at = 0;
    for (long n; at < all + end && (n = read(fd, buf + at, (size_t)(all + end - at))); at += (int)n) NEED(n > 0);
    if (at != all) fprintf(stderr, "%d bytes\n", at);
    NEED(at == all);
    for (int k = 0; k < at; k++) NEED(buf[k] == byte_at(k));
}

static void release(pthread_t t) {
    s->release = 1;
    NEED(!pthread_join(t, 0));
}

/* Its place is used again. */
static void again(int *next, pthread_t t) {
    for (int k = 0; k < NEXT; k++) next[k] = accepted();
    release(t);
    for (int k = 0; k < NEXT; k++) NEED(!shutdown(next[k], SHUT_WR));
    s->shut = 1;
    until(&s->left);
    for (int k = 0; k < NEXT; k++) read_all(next[k], FIRST + MORE, 1), close(next[k]);
}

static _Noreturn void finish(void) {
    printf("result ok\n"), fflush(stdout);
    _exit(0);
}

static void *closes(void *arg) {
    NEED(!close(*(int *)arg));
    s->closed = 1;
    return 0;
}

/* (The close may have to wait for the thread that is held.) */
static void replaced(int first, pid_t p) {
    pthread_t t, closer;
    int next = -1, status;
    char c;
    until(&s->left);
    NEED(!pthread_create(&t, 0, held, &first));
    until(&s->held);
    NEED(!pthread_create(&closer, 0, closes, &first));
    for (int k = 0; k < CLOSE_MS && !s->closed; k++) sleep_us(1000);
    if (s->closed) next = accepted();
    release(t);
    NEED(!pthread_join(closer, 0));
    if (next < 0) next = accepted();
    NEED(next == first);
    for (int k = 0; k < ROUNDS; k++) NEED(send(next, "x", 1, MSG_NOSIGNAL) == 1 && recv(next, &c, 1, 0) == 1);
    NEED(waitpid(p, &status, 0) == p && !status);
    finish();
}

static void *gives_back(void *arg) {
    char c;
    s->second = (int)syscall(SYS_gettid);
    until(&s->waiting);
    NEED(recv(*(int *)arg, &c, 1, 0) == 1);
    return 0;
}

static void filled(int fd) {
    int there = 0;
    for (int k = 0; there < UNREAD; k++, sleep_us(500)) NEED(!ioctl(fd, FIONREAD, &there) && k < 20000);
}

static void closed_beside(int first, pid_t p, pid_t q) {
    int next[NEXT], status, set = epoll_create1(0);
    struct epoll_event e = {.events = EPOLLIN};
    pthread_t t, other;
    s->number = first;
    int second = accepted();
    filled(first);
    NEED(!epoll_ctl(set, EPOLL_CTL_ADD, first, &e) && epoll_wait(set, &e, 1, -1) == 1);
    NEED(!pthread_create(&other, 0, gives_back, &second));
    until(&s->waiting);
    NEED(!pthread_create(&t, 0, held, &first));
    until(&s->given);
    NEED(!pthread_join(other, 0));
    for (int k = 0; k < NEXT; k++) next[k] = accepted();
    release(t);
    char c;
    for (long end = now_ms() + USED_MS; now_ms() < end; sleep_us(1000))
        for (int j = 0; j < NEXT; j++) NEED(send(next[j], "x", 1, MSG_NOSIGNAL) == 1 && recv(next[j], &c, 1, 0) == 1);
    for (int j = 0; j < NEXT; j++) close(next[j]);
    NEED(waitpid(p, &status, 0) == p && !status && waitpid(q, &status, 0) == q && !status);
    finish();
}

static void work(void) {
    int status, next[NEXT];
    pthread_t t;
    pid_t q = mode == 'c' ? fork() : -1, p = q ? fork() : -1;
    if (!q) prctl(PR_SET_PDEATHSIG, SIGKILL), peer_that_wakes();
    if (!p) prctl(PR_SET_PDEATHSIG, SIGKILL), mode == 'r' ? peer_that_is_reset() : mode == 'c' ? peer_that_leaves() : peer();
    int first = accepted();
    if (mode == 'r') replaced(first, p);
    if (mode == 'c') closed_beside(first, p, q);
    filled(first);
    NEED(waitpid(p, &status, WUNTRACED) == p && WIFSTOPPED(status));
    NEED(!pthread_create(&t, 0, held, &first));
    until(&s->held);
    if (mode != 'p') {
        sleep_us(HELD_US), release(t);
        if (mode == 's') spawn_true(); /* (to which the connection is lent: it leaves its lane) */
        read_all(mode == 's' ? first : 0, UNREAD, mode == 's');
        finish();
    }
    spawn_true();
    NEED(!kill(p, SIGCONT));
    again(next, t);
    NEED(waitpid(p, &status, 0) == p && !status);
    close(first);
    finish();
}

int main(int argc, char **argv) {
    socklen_t n = sizeof address;
    int status;
    s = mmap(0, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    listener = socket(AF_INET, SOCK_STREAM, 0);
    NEED(!bind(listener, (void *)&address, n) && !listen(listener, 100) && !getsockname(listener, (void *)&address, &n));
    alarm(110);
    NEED(argc == 2);
    mode = *argv[1];
    pid_t worker = fork();
    NEED(worker >= 0);
    if (!worker) prctl(PR_SET_PDEATHSIG, SIGKILL), work();
    mode == 'c' ? trace_both() : trace();
    NEED(waitpid(worker, &status, 0) == worker);
    return status != 0;
}
