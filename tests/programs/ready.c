/* Readiness as the kernel tells it: numbers that change hands, several threads, sets in sets.
 *
 *     ready CASE
 *
 * The other ends are threads of a forked server, which answers each message of 64 bytes by its first letter: 'e' comes
 * back, 'q' ends the connection, 'r' resets it. Prints "result ok".
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define MSG 64
#define SOON 10000 /* ms */
#define NEED(ok) \
    do { \
        if (!(ok)) { \
            fprintf(stderr, "FAILED line %d: %s (errno %d)\n", __LINE__, #ok, errno); \
            _exit(1); \
        } \
    } while (0)

static int port, promoted;
static pid_t child;

static void *serve(void *arg) {
    int fd = (int)(long)arg;
    char b[MSG];
    while (recv(fd, b, MSG, MSG_WAITALL) == MSG && *b == 'e') NEED(send(fd, b, MSG, MSG_NOSIGNAL) == MSG);
    struct linger l = {1, 0};
    if (*b == 'r') setsockopt(fd, SOL_SOCKET, SO_LINGER, &l, sizeof l);
    close(fd);
    return 0;
}

static void server(int l) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;) {
        int fd = accept(l, 0, 0), one = 1;
        NEED(fd >= 0 && !setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one));
        pthread_t t;
        NEED(!pthread_create(&t, 0, serve, (void *)(long)fd));
        pthread_detach(t);
    }
}

static void say(int fd, char what) {
    char b[MSG] = {what};
    NEED(send(fd, b, MSG, MSG_NOSIGNAL) == MSG);
}

static void hear(int fd) {
    char b[MSG];
    NEED(recv(fd, b, MSG, MSG_WAITALL) == MSG && *b == 'e');
}

static unsigned long on_tcp(int fd) {
    struct tcp_info i;
    socklen_t len = sizeof i;
    NEED(!getsockopt(fd, IPPROTO_TCP, TCP_INFO, &i, &len));
    return i.tcpi_bytes_sent + i.tcpi_bytes_received;
}

/* Messages until they travel on a lane. (TCP_INFO tells of TCP only.) */
static void settle(int fd) {
    for (int turn = 0; turn < SOON; turn++) {
        unsigned long before = on_tcp(fd);
        say(fd, 'e');
        hear(fd);
        if (!promoted || (turn > 2 && on_tcp(fd) == before)) return;
        usleep(1000);
    }
    NEED(!"there is no lane");
}

static int dial(void) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port)};
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    NEED(fd >= 0 && !connect(fd, (void *)&a, sizeof a));
    NEED(!setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one));
    return fd;
}

static int settled(void) {
    int fd = dial();
    settle(fd);
    return fd;
}

static int ctl(int ep, int op, int fd, unsigned events, unsigned data) {
    struct epoll_event ev = {events, {.u32 = data}};
    return epoll_ctl(ep, op, fd, &ev);
}

/* The only event that there is. */
static unsigned one(int ep, unsigned data, int ms) {
    struct epoll_event ev[8];
    int n = epoll_wait(ep, ev, 8, ms);
    if (n != 1 || ev[0].data.u32 != data)
        fprintf(stderr, "%d events, first %u with %#x\n", n, n > 0 ? ev[0].data.u32 : 0, n > 0 ? ev[0].events : 0);
    NEED(n == 1 && ev[0].data.u32 == data);
    return ev[0].events;
}

static void none(int ep) {
    struct epoll_event ev;
    int n = epoll_wait(ep, &ev, 1, 0);
    if (n) fprintf(stderr, "event %u with %#x\n", ev.data.u32, ev.events);
    NEED(n == 0);
}

static void readable(int fd) {
    struct pollfd p = {fd, POLLIN, 0};
    NEED(poll(&p, 1, SOON) == 1 && p.revents & POLLIN);
}

/* Back to TCP: no lane serves this call. */
static void leave(int fd) {
    int flags = fcntl(fd, F_GETFL);
    NEED(!fcntl(fd, F_SETFL, flags | O_ASYNC) && !fcntl(fd, F_SETFL, flags));
}

/* A copy that was watched, and is so no more, is closed; its number is another connection's then. */
static void copy_closed(void) {
    for (int k = 0; k < 20; k++) {
        int ep = epoll_create1(0), a = settled(), copy = dup(a);
        NEED(!ctl(ep, EPOLL_CTL_ADD, copy, EPOLLIN, 1));
        say(a, 'e');
        one(ep, 1, SOON);
        hear(copy);
        NEED(!ctl(ep, EPOLL_CTL_DEL, copy, 0, 0));
        close(copy);
        int b = settled();
        NEED(b == copy && !ctl(ep, EPOLL_CTL_ADD, b, EPOLLIN | EPOLLRDHUP, 2));
        none(ep);
        if (k & 1) leave(a);
        close(a);
        say(b, 'e');
        one(ep, 2, SOON);
        hear(b);
        say(b, 'q'); /* TCP's news */
        NEED(one(ep, 2, SOON) & EPOLLRDHUP);
        close(b), close(ep);
    }
}

/* A copy that is watched is closed: as long as the connection lives, its set tells of it (epoll(7)). */
static void copy_watched(void) {
    for (int k = 0; k < 20; k++) {
        int ep = epoll_create1(0), copy = settled(), a = dup(copy);
        NEED(!ctl(ep, EPOLL_CTL_ADD, copy, EPOLLIN, 1));
        none(ep);
        close(copy);
        say(a, 'e');
        one(ep, 1, SOON);
        hear(a);
        int b = settled();
        NEED(b == copy && !ctl(ep, EPOLL_CTL_ADD, b, EPOLLIN, 2));
        none(ep);
        if (k & 1) leave(a);
        say(a, 'e');
        one(ep, 1, SOON);
        hear(a);
        say(b, 'e');
        one(ep, 2, SOON);
        hear(b);
        if (k & 2) leave(b);
        close(a);
        none(ep);
        say(b, 'e');
        one(ep, 2, SOON);
        hear(b);
        say(b, 'q');
        one(ep, 2, SOON);
        close(b), close(ep);
    }
}

/* A set goes on under another number, and its first one is another set's. */
static void set_moves(void) {
    for (int k = 0; k < 20; k++) {
        int first = epoll_create1(0), a = dial(), ep, p[2];
        none(first); /* (before the first wait nothing in it gets a lane) */
        NEED(!pipe(p) && !ctl(first, EPOLL_CTL_ADD, a, EPOLLIN, 1));
        if (k & 1) settle(a);
        ep = dup(first);
        close(first);
        int other = epoll_create1(0);
        NEED(other == first && !ctl(other, EPOLL_CTL_ADD, p[0], EPOLLIN, 3));
        NEED(write(p[1], "x", 1) == 1);
        if (!(k & 1)) settle(a);
        say(a, 'e');
        one(ep, 1, SOON);
        hear(a);
        none(ep);
        NEED(!ctl(ep, EPOLL_CTL_ADD, p[0], EPOLLIN, 4));
        one(ep, 4, 0);
        one(other, 3, 0);
        NEED(!ctl(ep, EPOLL_CTL_DEL, p[0], 0, 0));
        leave(a);
        say(a, 'e');
        one(ep, 1, SOON);
        one(other, 3, 0);
        close(a), close(ep), close(other), close(p[0]), close(p[1]);
    }
}

static atomic_int turn, done;
static int race_ep, race_fd, race_op;

static void *racer(void *arg) {
    for (int t = 1;; t++) {
        while (atomic_load(&turn) < t) sched_yield();
        if (race_op < 0) return arg;
        while (ctl(race_ep, race_op, race_fd, EPOLLIN, 2)) NEED(errno == ENOENT);
        atomic_store(&done, t);
    }
}

/* One thread adds a connection, another changes or deletes it as soon as it is there. */
static void ctl_race(void) {
    int fd = settled();
    pthread_t t;
    NEED(!pthread_create(&t, 0, racer, 0));
    race_fd = fd;
    for (int k = 1; k <= 2000; k++) {
        race_ep = epoll_create1(0);
        race_op = k & 1 ? EPOLL_CTL_MOD : EPOLL_CTL_DEL;
        atomic_store(&turn, k);
        if (k & 2) sched_yield();
        NEED(!ctl(race_ep, EPOLL_CTL_ADD, fd, EPOLLIN, 1));
        while (atomic_load(&done) < k) sched_yield();
        say(fd, 'e');
        if (k & 1) one(race_ep, 2, SOON);
        readable(fd);
        if (!(k & 1)) none(race_ep);
        hear(fd);
        close(race_ep);
    }
    race_op = -1;
    atomic_fetch_add(&turn, 1);
    pthread_join(t, 0);
}

static atomic_int told, quit, set, inside[2];

static void *waiter(void *arg) {
    int me = (int)(long)arg;
    while (!atomic_load(&quit)) {
        atomic_store(&inside[me], 1);
        int ep = atomic_load(&set);
        struct epoll_event ev;
        if (ep >= 0 && epoll_wait(ep, &ev, 1, 0) == 1) atomic_fetch_add(&told, 1);
        atomic_store(&inside[me], 0);
        sched_yield();
    }
    return 0;
}

/* What is one-shot, or edge-triggered and nothing new, is told of once each time it is armed, to one of two threads. */
static void once(void) {
    int fd = settled();
    pthread_t t[2];
    atomic_store(&set, -1);
    for (long k = 0; k < 2; k++) NEED(!pthread_create(&t[k], 0, waiter, (void *)k));
    for (int k = 0; k < 3000; k++) {
        int ep = epoll_create1(0);
        if (k % 100 == 0) settle(fd);
        atomic_store(&told, 0);
        atomic_store(&set, ep);
        if (k & 1) NEED(!ctl(ep, EPOLL_CTL_ADD, fd, EPOLLONESHOT, 1));
        NEED(!ctl(ep, k & 1 ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, fd, EPOLLOUT | (k & 2 ? EPOLLET : EPOLLONESHOT), 1));
        while (!atomic_load(&told)) sched_yield();
        for (int j = 0; j < 3; j++) none(ep);
        atomic_store(&set, -1);
        for (int j = 0; j < 2; j++)
            while (atomic_load(&inside[j])) sched_yield();
        NEED(atomic_load(&told) == 1);
        close(ep);
    }
    atomic_store(&quit, 1);
    for (int k = 0; k < 2; k++) pthread_join(t[k], 0);
}

/* A one-shot registration that was told of says nothing more, not even of a reset. */
static void spent(void) {
    for (int k = 0; k < 8; k++) {
        int ep = epoll_create1(0), fd = settled();
        NEED(!ctl(ep, EPOLL_CTL_ADD, fd, EPOLLIN | EPOLLONESHOT, 1));
        say(fd, 'e');
        one(ep, 1, SOON);
        hear(fd);
        if (k & 1) leave(fd);
        NEED(ctl(ep, EPOLL_CTL_ADD, fd, EPOLLIN, 5) == -1 && errno == EEXIST);
        say(fd, 'r');
        struct pollfd p = {fd, POLLIN, 0};
        NEED(poll(&p, 1, SOON) == 1 && p.revents & POLLHUP);
        none(ep);
        if (k & 4) {
            NEED(!ctl(ep, EPOLL_CTL_DEL, fd, 0, 0));
            NEED(ctl(ep, EPOLL_CTL_MOD, fd, EPOLLIN, 5) == -1 && errno == ENOENT);
            NEED(!ctl(ep, EPOLL_CTL_ADD, fd, EPOLLIN, 2));
        } else {
            NEED(!ctl(ep, EPOLL_CTL_MOD, fd, EPOLLIN | EPOLLONESHOT, 2));
        }
        NEED(one(ep, 2, SOON) & EPOLLHUP);
        close(fd), close(ep);
    }
}

/* A set is watched from outside while its connection is about to get a lane. */
static void nested(void) {
    settled();
    for (int k = 0; k < 60; k++) {
        int ep = epoll_create1(0), outer = epoll_create1(0), fd = dial();
        NEED(!ctl(ep, EPOLL_CTL_ADD, fd, EPOLLIN, 1));
        for (volatile int spin = 0; spin < k * 2000; spin++) {}
        struct pollfd p = {ep, POLLIN, 0};
        fd_set r;
        struct timeval soon = {SOON / 1000, 0};
        if (k % 3 == 0) NEED(poll(&p, 1, 0) == 0);
        if (k % 3 == 1) NEED(!ctl(outer, EPOLL_CTL_ADD, ep, EPOLLIN, 7));
        for (int turn = 0; turn < 12; turn++) {
            char b[MSG];
            say(fd, 'e');
            for (int half = 0; half < 2; half++) {
                FD_ZERO(&r);
                FD_SET(ep, &r);
                if (k % 3 == 0) NEED(poll(&p, 1, SOON) == 1 && p.revents == POLLIN);
                if (k % 3 == 1) one(outer, 7, SOON);
                if (k % 3 == 2) NEED(select(ep + 1, &r, 0, 0, &soon) == 1 && FD_ISSET(ep, &r));
                one(ep, 1, -1);
                NEED(recv(fd, b, MSG / 2, MSG_WAITALL) == MSG / 2);
            }
            usleep(500);
        }
        close(fd), close(ep), close(outer);
    }
}

/* What is always ready keeps nothing else from its turn, however few are asked for and rarely. */
static void turns(void) {
    int ep = epoll_create1(0), fd = settled(), p[2];
    NEED(!pipe(p) && write(p[1], "x", 1) == 1);
    NEED(!ctl(ep, EPOLL_CTL_ADD, p[0], EPOLLIN, 1) && !ctl(ep, EPOLL_CTL_ADD, fd, EPOLLIN, 2));
    for (int k = 0; k < 100; k++) {
        int got[3] = {0};
        if (k % 10 == 0) settle(fd);
        say(fd, 'e');
        readable(fd);
        for (int j = 0; j < 20; j++) {
            struct epoll_event ev;
            NEED(epoll_wait(ep, &ev, 1, 0) == 1 && ev.data.u32 < 3);
            got[ev.data.u32]++;
            usleep(50);
        }
        NEED(got[1] && got[2]);
        hear(fd);
    }
}

static atomic_int handled;
static void handler(int sig) {
    (void)sig;
    atomic_fetch_add(&handled, 1);
}

/* A look that takes no time lets handlers run whose signals its mask permits, if nothing is ready. */
static void masks(void) {
    int fd = settled(), ep = epoll_create1(0);
    struct sigaction a = {.sa_handler = handler, .sa_flags = SA_RESTART};
    struct timespec zero = {0, 0};
    struct pollfd p[2] = {{fd, POLLIN, 0}, {fd, POLLIN, 0}};
    sigset_t some, empty;
    NEED(!sigaction(SIGUSR1, &a, 0) && !ctl(ep, EPOLL_CTL_ADD, fd, EPOLLIN, 1));
    sigemptyset(&empty), sigemptyset(&some), sigaddset(&some, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &some, 0);
    for (int k = 0; k < 40; k++) {
        fd_set r;
        FD_ZERO(&r);
        FD_SET(fd, &r);
        struct epoll_event ev;
        pthread_kill(pthread_self(), SIGUSR1);
        NEED(poll(p, 2, 0) == 0 && atomic_load(&handled) == k);
        int n = k & 1 ? ppoll(p, 2, &zero, &empty) : pselect(fd + 1, &r, 0, 0, &zero, &empty);
        NEED(n == -1 && errno == EINTR && atomic_load(&handled) == k + 1);
        NEED(k & 1 || FD_ISSET(fd, &r));
        say(fd, 'e');
        readable(fd);
        pthread_kill(pthread_self(), SIGUSR1);
        /* What is ready comes first. */
        n = k & 1 ? ppoll(p, 2, 0, &empty) : pselect(fd + 1, &r, 0, 0, 0, &empty);
        NEED(n == (k & 1 ? 2 : 1) && atomic_load(&handled) == k + 1);
        NEED(epoll_pwait(ep, &ev, 1, -1, &empty) == 1 && atomic_load(&handled) == k + 1);
        hear(fd);
        NEED(epoll_pwait(ep, &ev, 1, 0, &empty) == 0 && atomic_load(&handled) == k + 1);
        NEED(epoll_pwait(ep, &ev, 1, -1, &empty) == -1 && errno == EINTR);
        NEED(atomic_load(&handled) == k + 2);
        atomic_store(&handled, k + 1);
    }
}

static atomic_int sleeper;
static int sleeps_in;

static void *sleeps(void *arg) {
    atomic_store(&sleeper, (int)syscall(SYS_gettid));
    one(sleeps_in, 1, SOON);
    return arg;
}

/* A set is closed while a thread waits in it, and its number is another set's. */
static void closed_set(void) {
    for (int k = 0; k < 20; k++) {
        int ep = epoll_create1(0), fd = dial(), p[2];
        NEED(!pipe(p) && write(p[1], "x", 1) == 1);
        if (k & 1) settle(fd);
        NEED(!ctl(ep, EPOLL_CTL_ADD, fd, EPOLLIN, 1));
        sleeps_in = ep;
        atomic_store(&sleeper, 0);
        pthread_t t;
        NEED(!pthread_create(&t, 0, sleeps, 0));
        char name[64], state = 0;
        while (!atomic_load(&sleeper)) sched_yield();
        snprintf(name, sizeof name, "/proc/self/task/%d/stat", atomic_load(&sleeper));
        for (int asleep = 0; asleep < 5; asleep = state == 'S' ? asleep + 1 : 0) {
            FILE *f = fopen(name, "r");
            NEED(f && fscanf(f, "%*d %*s %c", &state) == 1);
            fclose(f);
            usleep(1000);
        }
        close(ep);
        int other = epoll_create1(0);
        NEED(other == ep && !ctl(other, EPOLL_CTL_ADD, p[0], EPOLLIN, 3));
        say(fd, 'e');
        NEED(!pthread_join(t, 0));
        one(other, 3, 0);
        hear(fd);
        close(fd), close(other), close(p[0]), close(p[1]);
    }
}

/* What the kernel refuses. */
static void refusals(void) {
    int ep = epoll_create1(0), fd = settled();
    struct epoll_event ev[1];
    volatile int most = 1 << 30;
    for (int k = 0; k < 3; k++) {
        NEED(!ctl(ep, EPOLL_CTL_ADD, fd, EPOLLIN, 1));
        none(ep);
        NEED(ctl(ep, EPOLL_CTL_ADD, fd, EPOLLIN, 2) == -1 && errno == EEXIST);
        NEED(ctl(ep, EPOLL_CTL_MOD, fd, EPOLLIN | EPOLLEXCLUSIVE, 2) == -1 && errno == EINVAL);
        NEED(ctl(ep, EPOLL_CTL_ADD, fd, EPOLLIN | EPOLLEXCLUSIVE | EPOLLONESHOT, 2) == -1 && errno == EINVAL);
        NEED(ctl(ep, 77, fd, EPOLLIN, 2) == -1 && errno == EINVAL);
        NEED(epoll_ctl(ep, EPOLL_CTL_MOD, fd, 0) == -1 && errno == EFAULT);
        NEED(epoll_wait(ep, ev, 0, 0) == -1 && errno == EINVAL);
        NEED(epoll_wait(ep, ev, -most, 0) == -1 && errno == EINVAL);
        NEED(epoll_wait(ep, ev, most, 0) == -1 && errno == EINVAL);
        struct timespec bad = {0, 1000000000};
        NEED(epoll_pwait2(ep, ev, 1, &bad, 0) == -1 && errno == EINVAL);
        say(fd, 'e');
        one(ep, 1, SOON);
        hear(fd);
        NEED(!ctl(ep, EPOLL_CTL_DEL, fd, 0, 0));
        NEED(ctl(ep, EPOLL_CTL_DEL, fd, 0, 0) == -1 && errno == ENOENT);
        NEED(ctl(ep, EPOLL_CTL_MOD, fd, EPOLLIN, 2) == -1 && errno == ENOENT);
        NEED(ctl(ep, EPOLL_CTL_ADD, fd, EPOLLIN | EPOLLEXCLUSIVE | EPOLLONESHOT, 2) == -1 && errno == EINVAL);
    }
    struct pollfd p[64] = {{fd, POLLIN, 0}}; /* of which RLIMIT_NOFILE allows so many */
    struct rlimit few = {40, 4096};
    NEED(!setrlimit(RLIMIT_NOFILE, &few) && poll(p, 64, 0) == -1 && errno == EINVAL);
    NEED(!ctl(ep, EPOLL_CTL_ADD, fd, EPOLLIN | EPOLLEXCLUSIVE, 2));
    NEED(ctl(ep, EPOLL_CTL_MOD, fd, EPOLLIN, 3) == -1 && errno == EINVAL);
    say(fd, 'e');
    one(ep, 2, SOON);
    hear(fd);
}

/* A set goes on in a child, and in the parent that has waited for it; or the child is all that is left. */
static void forked(void) {
    for (int k = 0; k < 12; k++) {
        int ep = epoll_create1(0), a = settled(), b = settled(), p[2];
        char end;
        NEED(!pipe(p));
        NEED(!ctl(ep, EPOLL_CTL_ADD, a, EPOLLIN, 1));
        NEED(!ctl(ep, EPOLL_CTL_ADD, b, EPOLLIN | EPOLLONESHOT, 2));
        none(ep);
        if (k & 1) say(b, 'e'), one(ep, 2, SOON), hear(b);
        pid_t middle = k & 2 ? fork() : 0;
        pid_t child = middle ? 0 : fork();
        if (k & 2 && !middle && child) _exit(0); /* as a daemon begins */
        if (!middle && !child) {
            for (int j = 0; j < 10; j++) {
                say(a, 'e');
                one(ep, 1, SOON);
                hear(a);
            }
            if (k & 2) NEED(!ctl(ep, EPOLL_CTL_MOD, a, EPOLLIN, 11));
            say(a, 'e');
            one(ep, k & 2 ? 11 : 1, SOON);
            hear(a);
            if (k & 1) NEED(!ctl(ep, EPOLL_CTL_MOD, b, EPOLLIN | EPOLLONESHOT, 2));
            say(b, 'e');
            one(ep, 2, SOON);
            hear(b);
            say(b, 'e');
            readable(b);
            none(ep);
            hear(b);
            NEED(write(p[1], "k", 1) == 1);
            _exit(0);
        }
        int status;
        close(p[1]);
        NEED(waitpid(middle ? middle : child, &status, 0) > 0 && status == 0);
        if (k & 2) {
            close(a), close(b), close(ep);
            NEED(read(p[0], &end, 1) == 1);
        } else {
            for (int j = 0; j < 10; j++) {
                say(a, 'e');
                one(ep, 1, SOON);
                hear(a);
            }
            close(a), close(b), close(ep);
        }
        close(p[0]);
    }
}

/* Of several sets that watch a connection, each is told; of several threads in one set, with EPOLLEXCLUSIVE, one. */
static void exclusive(void) {
    for (int k = 0; k < 10; k++) {
        int ep = epoll_create1(0), ep2 = epoll_create1(0), a = k & 1 ? settled() : dial();
        NEED(!ctl(ep, EPOLL_CTL_ADD, a, EPOLLIN | EPOLLEXCLUSIVE, 1));
        NEED(!ctl(ep2, EPOLL_CTL_ADD, a, EPOLLIN, 2));
        for (int j = 0; j < 20; j++) {
            say(a, 'e');
            one(ep, 1, SOON);
            one(ep2, 2, SOON);
            hear(a);
            none(ep), none(ep2);
        }
        NEED(ctl(ep, EPOLL_CTL_MOD, a, EPOLLIN, 3) == -1 && errno == EINVAL);
        NEED(!ctl(ep, EPOLL_CTL_DEL, a, 0, 0));
        say(a, 'e');
        one(ep2, 2, SOON);
        none(ep);
        hear(a);
        close(a), close(ep), close(ep2);
    }
}

static const struct {
    const char *name;
    void (*run)(void);
} cases[] = {
    {"copy-closed", copy_closed}, {"copy-watched", copy_watched}, {"set-moves", set_moves}, {"ctl-race", ctl_race},
    {"once", once}, {"spent", spent}, {"nested", nested}, {"turns", turns}, {"masks", masks},
    {"forked", forked}, {"exclusive", exclusive}, {"closed-set", closed_set}, {"refusals", refusals},
};

int main(int argc, char **argv) {
    struct sockaddr_in a = {.sin_family = AF_INET};
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t len = sizeof a;
    int l = socket(AF_INET, SOCK_STREAM, 0);
    NEED(l >= 0 && !bind(l, (void *)&a, sizeof a) && !listen(l, 100));
    getsockname(l, (void *)&a, &len);
    port = ntohs(a.sin_port);
    promoted = getenv("LD_PRELOAD") != 0;
    if (!(child = fork())) server(l);
    close(l);
    alarm(100);
    for (unsigned k = 0; k < sizeof cases / sizeof *cases; k++)
        if (argc > 1 && !strcmp(argv[1], cases[k].name)) {
            cases[k].run();
            kill(child, SIGKILL);
            waitpid(child, 0, 0);
            printf("result ok\n");
            return 0;
        }
    return 2;
}
