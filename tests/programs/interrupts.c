/* What a signal does to a call that sleeps: EINTR, or on with it, as the handler's SA_RESTART and the call
 * have it (signal(7)); and that a handler may use the very connection that its thread sleeps on.
 *
 *     interrupts
 *
 * Each case is asserted as the kernel has it. Both ends are in this process. Prints "result ok".
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define NEED(ok) \
    do { \
        if (!(ok)) { \
            fprintf(stderr, "FAILED line %d: %s (errno %d)\n", __LINE__, #ok, errno); \
            exit(1); \
        } \
    } while (0)

static int a, b; /* two ends of one connection */
static atomic_int ran;

static void count(int sig) {
    (void)sig;
    atomic_fetch_add(&ran, 1);
}

static void hook(int sig, void (*f)(int), int flags) {
    struct sigaction s = {0};
    s.sa_handler = f;
    s.sa_flags = flags;
    NEED(!sigaction(sig, &s, 0));
}

#define SLOW_MS 100

static void slowly(int sig);
static pthread_t sleeper;

/* Signals the sleeper after `ms`, `n` times, then writes `bytes` to `b`, or, if they are LEAVES, brings it to TCP for good. */
#define LEAVES (-1)
struct plan {
    int sig, n, ms, bytes;
};

static void nap(int ms) {
    struct timespec t = {ms / 1000, ms % 1000 * 1000000L};
    while (nanosleep(&t, &t)) {}
}

static void slowly(int sig) {
    int e = errno;
    count(sig);
    nap(SLOW_MS);
    errno = e;
}

static atomic_int calling; /* 0: not yet, 1: in its call, 2: it is over */

/* Until the sleeper sleeps in its call, or it is over. */
static void asleep(void) {
    char path[64], stat[256] = {0};
    while (!atomic_load(&calling)) nap(1);
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", (int)getpid());
    do {
        nap(1);
        FILE *f = fopen(path, "r");
        NEED(f && fgets(stat, sizeof stat, f));
        fclose(f);
    } while (!strstr(stat, ") S ") && atomic_load(&calling) == 1);
}

static void *act(void *arg) {
    struct plan *p = arg;
    for (int k = 0; k < p->n; k++) {
        nap(p->ms);
        asleep();
        pthread_kill(sleeper, p->sig);
    }
    char x[4096] = {0};
    if (p->bytes == LEAVES) {
        int two = 2;
        nap(SLOW_MS / 2);
        NEED(!setsockopt(b, SOL_SOCKET, SO_RCVLOWAT, &two, sizeof two));
    } else if (p->bytes) {
        nap(p->ms);
        NEED(send(b, x, p->bytes, 0) == p->bytes);
    }
    return 0;
}

/* Runs `call` while the plan is carried out: what it returned, with errno. */
static long during(struct plan p, long (*call)(void)) {
    pthread_t t;
    sigset_t s;
    sigemptyset(&s);
    sigaddset(&s, SIGUSR1), sigaddset(&s, SIGUSR2), sigaddset(&s, SIGALRM);
    pthread_sigmask(SIG_BLOCK, &s, 0);
    atomic_store(&ran, 0), atomic_store(&calling, 0);
    pthread_create(&t, 0, act, &p);
    pthread_sigmask(SIG_UNBLOCK, &s, 0);
    atomic_store(&calling, 1);
    long r = call();
    int e = errno;
    atomic_store(&calling, 2);
    pthread_join(t, 0);
    errno = e;
    return r;
}

static char buf[8192];
static int how;
static long do_recv(void) { return recv(a, buf, 100, 0); }
static long do_read(void) { return read(a, buf, 100); }
static long do_all(void) { return recv(a, buf, 100, MSG_WAITALL); }
static long do_poll(void) {
    struct pollfd p = {a, POLLIN, 0};
    return poll(&p, 1, 5000);
}
static long do_ppoll(void) {
    struct pollfd p = {a, POLLIN, 0};
    struct timespec t = {5, 0};
    sigset_t none;
    sigemptyset(&none);
    return ppoll(&p, 1, &t, &none);
}
static long do_select(void) {
    fd_set s;
    FD_ZERO(&s);
    FD_SET(a, &s);
    struct timeval t = {5, 0};
    return select(a + 1, &s, 0, 0, &t);
}
static int ep;
static long do_epoll(void) {
    struct epoll_event ev;
    return epoll_wait(ep, &ev, 1, 5000);
}
static long do_send(void) {
    static char big[1 << 20];
    return send(a, big, sizeof big, 0);
}

static void drain(int fd) {
    while (recv(fd, buf, sizeof buf, MSG_DONTWAIT) > 0) {}
}

/* A few rounds, so that both directions are on the lane. */
static void warm(void) {
    for (int k = 0; k < 40; k++) {
        NEED(send(a, buf, 8, 0) == 8 && recv(b, buf, 8, MSG_WAITALL) == 8);
        NEED(send(b, buf, 8, 0) == 8 && recv(a, buf, 8, MSG_WAITALL) == 8);
        nap(1);
    }
}

/* With SA_RESTART a receive goes on, without it ends; whichever other handlers there are. */
static void restarts(void) {
    hook(SIGUSR1, count, SA_RESTART);
    hook(SIGUSR2, count, 0);
    NEED(during((struct plan){SIGUSR1, 3, 30, 7}, do_recv) == 7);
    NEED(atomic_load(&ran) == 3);
    NEED(during((struct plan){SIGUSR2, 1, 30, 0}, do_recv) == -1 && errno == EINTR);
    NEED(during((struct plan){SIGUSR2, 1, 30, 0}, do_read) == -1 && errno == EINTR);
    NEED(during((struct plan){SIGUSR1, 3, 30, 9}, do_read) == 9);
    /* (siginterrupt changes the flags of a handler that is installed) */
    NEED(!siginterrupt(SIGUSR1, 1));
    NEED(during((struct plan){SIGUSR1, 1, 30, 0}, do_recv) == -1 && errno == EINTR);
    NEED(!siginterrupt(SIGUSR1, 0));
    NEED(during((struct plan){SIGUSR1, 2, 30, 3}, do_recv) == 3);
}

static void raises(int sig) {
    (void)sig;
    raise(SIGUSR2);
}

static void raises_and_sends(int sig) {
    int e = errno;
    char x;
    raises(sig);
    NEED(send(a, "x", 1, 0) == 1 && recv(b, &x, 1, 0) == 1);
    errno = e;
}

/* A signal that comes while the handler of another runs: the first one's handler has decided. */
static void nested(void) {
    void (*first[])(int) = {raises, raises_and_sends};
    for (int k = 0; k < 2; k++) {
        hook(SIGUSR1, first[k], SA_RESTART);
        hook(SIGUSR2, count, 0);
        NEED(during((struct plan){SIGUSR1, 2, 30, 7}, do_recv) == 7);
        NEED(atomic_load(&ran) == 2);
        hook(SIGUSR1, first[k], 0);
        hook(SIGUSR2, count, SA_RESTART);
        NEED(during((struct plan){SIGUSR1, 1, 30, 0}, do_recv) == -1 && errno == EINTR);
        NEED(during((struct plan){SIGUSR1, 1, 30, 0}, do_poll) == -1 && errno == EINTR);
    }
}

/* A part that is there is told after any handler. */
static void parts(void) {
    for (int k = 0; k < 2; k++) {
        hook(SIGUSR1, count, k ? 0 : SA_RESTART);
        NEED(send(b, buf, 40, 0) == 40);
        NEED(during((struct plan){SIGUSR1, 1, 50, 0}, do_all) == 40);
    }
    hook(SIGUSR1, count, SA_RESTART);
    NEED(during((struct plan){SIGUSR1, 1, 50, 100}, do_all) == 100);
    long n = during((struct plan){SIGUSR1, 1, 200, 0}, do_send);
    NEED(n > 0);
    while (n > 0) {
        long r = recv(b, buf, sizeof buf, 0);
        NEED(r > 0);
        n -= r;
    }
}

/* A call with a time-out of its own ends after any handler. */
static void timed(void) {
    struct timeval t = {5, 0}, none = {0, 0};
    hook(SIGUSR1, count, SA_RESTART);
    NEED(!setsockopt(a, SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t));
    NEED(during((struct plan){SIGUSR1, 1, 30, 0}, do_recv) == -1 && errno == EINTR);
    NEED(!setsockopt(a, SOL_SOCKET, SO_RCVTIMEO, &none, sizeof none));
}

/* Waits end after any. */
static void waits(void) {
    long (*calls[])(void) = {do_poll, do_ppoll, do_select, do_epoll};
    ep = epoll_create1(0);
    struct epoll_event ev = {EPOLLIN, {.fd = a}};
    NEED(!epoll_ctl(ep, EPOLL_CTL_ADD, a, &ev));
    for (int k = 0; k < 4; k++) {
        for (int f = 0; f < 2; f++) {
            hook(SIGUSR1, count, f ? SA_RESTART : 0);
            NEED(during((struct plan){SIGUSR1, 1, 30, 0}, calls[k]) == -1 && errno == EINTR);
            NEED(atomic_load(&ran) == 1);
        }
        NEED(during((struct plan){0, 0, 30, 5}, calls[k]) == 1);
        drain(a);
    }
    close(ep);
}

/* A storm of signals with SA_RESTART: some come while the call spins, looks, or is about to sleep. */
static void storm(void) {
    hook(SIGALRM, count, SA_RESTART);
    struct itimerval it = {{0, 300}, {0, 300}}, off = {{0, 0}, {0, 0}};
    setitimer(ITIMER_REAL, &it, 0);
    for (int k = 0; k < 20; k++) NEED(during((struct plan){0, 0, 5, 5}, do_recv) == 5);
    setitimer(ITIMER_REAL, &off, 0);
    hook(SIGALRM, count, 0);
    for (int k = 0; k < 200; k++) {
        /* One shot, sooner or later: it ends the call, or came before it. */
        struct itimerval once = {{0, 20000}, {0, 1 + k * 2}};
        atomic_store(&ran, 0);
        setitimer(ITIMER_REAL, &once, 0);
        NEED(do_recv() == -1 && errno == EINTR);
        setitimer(ITIMER_REAL, &off, 0);
        NEED(atomic_load(&ran) > 0);
    }
}

static void answer(int sig) {
    (void)sig;
    char x[16];
    int e = errno;
    /* The thread sleeps in recv(a): what the handler sends comes back to it by way of `b`. */
    if (send(a, "ping", 4, MSG_DONTWAIT) == 4 && recv(b, x, 4, 0) == 4) send(b, "pong!", 5, 0);
    errno = e;
}

static void own(void) {
    hook(SIGUSR1, answer, SA_RESTART);
    for (int k = 0; k < 5; k++) {
        NEED(during((struct plan){SIGUSR1, 1, 10, 0}, do_recv) == 5 && !memcmp(buf, "pong!", 5));
    }
}

static sigjmp_buf out;

static void leave(int sig) {
    (void)sig;
    siglongjmp(out, 1);
}

static volatile int jumps;

/* Leaving by siglongjmp, time and again: nothing is left behind that a later call meets. */
static void jump(void) {
    long (*calls[])(void) = {do_recv, do_poll, do_select, do_epoll, do_send};
    hook(SIGALRM, leave, 0);
    ep = epoll_create1(0);
    struct epoll_event ev = {EPOLLIN, {.fd = a}};
    NEED(!epoll_ctl(ep, EPOLL_CTL_ADD, a, &ev));
    for (jumps = 0; jumps < 60; jumps++) {
        if (!sigsetjmp(out, 1)) {
            struct itimerval once = {{0, 0}, {0, 3000}};
            setitimer(ITIMER_REAL, &once, 0);
            calls[jumps % 4]();
            NEED(!"came back");
        }
    }
    hook(SIGUSR1, count, 0);
    NEED(during((struct plan){SIGUSR1, 1, 30, 0}, do_recv) == -1 && errno == EINTR);
    for (int k = 0; k < 4; k++) {
        NEED(during((struct plan){0, 0, 30, 5}, calls[k]) >= 1);
        drain(a);
    }
    close(ep);
}

/* Actions read back, one-shot handlers, and masks, as they were set. */
static void actions(void) {
    struct sigaction s = {0}, old;
    s.sa_handler = count;
    s.sa_flags = SA_RESETHAND | SA_NODEFER;
    sigaddset(&s.sa_mask, SIGHUP);
    NEED(!sigaction(SIGWINCH, &s, 0) && !sigaction(SIGWINCH, 0, &old));
    int of = SA_RESETHAND | SA_NODEFER | SA_RESTART | SA_SIGINFO | SA_ONSTACK;
    NEED(old.sa_handler == count && (old.sa_flags & of) == (SA_RESETHAND | SA_NODEFER));
    NEED(sigismember(&old.sa_mask, SIGHUP) == 1 && sigismember(&old.sa_mask, SIGINT) == 0);
    atomic_store(&ran, 0);
    raise(SIGWINCH);
    NEED(atomic_load(&ran) == 1);
    NEED(!sigaction(SIGWINCH, 0, &old) && old.sa_handler == SIG_DFL);
    raise(SIGWINCH);
    NEED(atomic_load(&ran) == 1);
    NEED(signal(SIGWINCH, SIG_IGN) == SIG_DFL && signal(SIGWINCH, count) == SIG_IGN);
    NEED(signal(SIGWINCH, SIG_DFL) == count);
    NEED(signal(SIGKILL, count) == SIG_ERR && errno == EINVAL);
    NEED(sigaction(SIGSTOP, &s, 0) == -1 && errno == EINVAL && sigaction(100, 0, &old) == -1);
    /* By number: the kernel's own structure. */
    unsigned long k[4], set[4] = {(unsigned long)count, SA_RESTART, 0, 0};
    NEED(!signal(SIGWINCH, SIG_DFL));
    NEED(!syscall(SYS_rt_sigaction, SIGWINCH, 0, k, 8) && !k[0]);
    hook(SIGWINCH, count, SA_RESTART);
    NEED(!syscall(SYS_rt_sigaction, SIGWINCH, 0, k, 8));
    NEED(k[0] == (unsigned long)count && (k[1] & (SA_RESTART | SA_SIGINFO)) == SA_RESTART);
    set[1] = k[1], set[2] = k[2];
    NEED(!syscall(SYS_rt_sigaction, SIGWINCH, set, k, 8) && !sigaction(SIGWINCH, 0, &old));
    NEED(old.sa_handler == count);
    atomic_store(&ran, 0);
    raise(SIGWINCH);
    NEED(atomic_load(&ran) == 1);
    pid_t p = vfork();
    if (!p) {
        signal(SIGUSR2, SIG_DFL); /* in the child only */
        _exit(0);
    }
    hook(SIGUSR2, count, 0);
    NEED(!sigaction(SIGUSR2, 0, &old) && old.sa_handler == count);
}

/* While the handler runs, the other end goes to TCP, and this one cannot come from there again: it is half closed. */
static void meanwhile(void) {
    hook(SIGUSR1, slowly, 0);
    NEED(!shutdown(a, SHUT_WR));
    alarm(20);
    NEED(during((struct plan){SIGUSR1, 1, 30, LEAVES}, do_recv) == -1 && errno == EINTR);
    alarm(0);
    NEED(during((struct plan){0, 0, 30, 5}, do_recv) == 5);
}

int main(void) {
    struct sockaddr_in s = {.sin_family = AF_INET};
    s.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t l = sizeof s;
    hook(SIGUSR2, count, 0); /* one from before the first socket */
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    NEED(!bind(listener, (void *)&s, sizeof s) && !listen(listener, 5));
    getsockname(listener, (void *)&s, &l);
    a = socket(AF_INET, SOCK_STREAM, 0);
    NEED(!connect(a, (void *)&s, sizeof s));
    b = accept(listener, 0, 0);
    sleeper = pthread_self();
    how = 0;
    warm();
    NEED(during((struct plan){SIGUSR2, 1, 30, 0}, do_recv) == -1 && errno == EINTR);
    restarts();
    nested();
    parts();
    timed();
    waits();
    storm();
    own();
    jump();
    actions();
    warm();
    meanwhile();
    printf("result ok\n");
    return 0;
}
