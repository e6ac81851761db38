/* Threads that are cancelled in a call that sleeps, and threads that leave one by siglongjmp: the connection
 * goes on as if nothing had been, and is promoted if it was not yet.
 *
 *     cancelled
 *
 * Both ends are in this process. Prints "result ok".
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
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

static struct sockaddr_in at;
static socklen_t len = sizeof at;
static int listener;
static int a, b; /* two ends of one connection */
static volatile int ran;

static void nap(int ms) {
    struct timespec t = {ms / 1000, ms % 1000 * 1000000L};
    while (nanosleep(&t, &t)) {}
}

static void count(int sig) {
    (void)sig;
    ran++;
}

static int dial(void) {
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    NEED(!connect(fd, (void *)&at, len));
    return fd;
}

/* Both directions, both ways, more than a few times. */
static void exchange(int rounds) {
    char x[64], y[64];
    for (int k = 0; k < rounds; k++) {
        memset(x, k, sizeof x);
        NEED(send(a, x, sizeof x, 0) == sizeof x && recv(b, y, sizeof y, MSG_WAITALL) == sizeof y);
        NEED(!memcmp(x, y, sizeof x));
        NEED(send(b, x, sizeof x, 0) == sizeof x && recv(a, y, sizeof y, MSG_WAITALL) == sizeof y);
        NEED(!memcmp(x, y, sizeof x));
        if (k % 8 == 0) nap(1);
    }
}

static char buf[1 << 20];
static int ep;
static volatile int said;

static void do_recv(int fd) { recv(fd, buf, 100, 0); }
static void do_read(int fd) { (void)!read(fd, buf, 100); }
static void do_all(int fd) { recv(fd, buf, 100, MSG_WAITALL); }
static void do_peek(int fd) { recv(fd, buf, 100, MSG_WAITALL | MSG_PEEK); }
static void do_poll(int fd) {
    struct pollfd p = {fd, POLLIN, 0};
    poll(&p, 1, -1);
}
static void do_select(int fd) {
    fd_set s;
    FD_ZERO(&s);
    FD_SET(fd, &s);
    select(fd + 1, &s, 0, 0, 0);
}
static void do_epoll(int fd) {
    struct epoll_event ev;
    (void)fd;
    epoll_wait(ep, &ev, 1, -1);
}
static void do_send(int fd) {
    for (;;) send(fd, buf, sizeof buf, 0);
}
static void do_accept(int fd) {
    (void)fd;
    accept(listener, 0, 0);
}

static void (*calls[])(int) = {do_recv, do_read, do_all, do_peek, do_poll, do_select, do_epoll, do_accept};
#define CALLS (int)(sizeof calls / sizeof *calls)

/* What a cancelled thread still does: hooks and handlers serve it as ever. */
static void goodbye(void *fd) {
    ran = 0;
    raise(SIGUSR1);
    NEED(ran == 1);
    NEED(send(*(int *)fd, "bye", 3, 0) == 3);
    said = 1;
}

static void *sleeper(void *call) {
    int fd = a;
    pthread_cleanup_push(goodbye, &fd);
    (*(void (**)(int))call)(fd);
    fprintf(stderr, "FAILED: call came back\n");
    exit(1);
    pthread_cleanup_pop(0);
    return 0;
}

static void cancel(void (**call)(int)) {
    pthread_t t;
    void *r;
    said = 0;
    NEED(!pthread_create(&t, 0, sleeper, call));
    nap(30);
    NEED(!pthread_cancel(t) && !pthread_join(t, &r) && r == PTHREAD_CANCELED && said);
    char x[3];
    NEED(recv(b, x, 3, MSG_WAITALL) == 3 && !memcmp(x, "bye", 3));
}

static void *other(void *fd) {
    char x[8];
    NEED(recv(*(int *)fd, x, 8, MSG_WAITALL) == 8);
    return 0;
}

/* The rest of what a cancelled send has left. */
static void flood(void) {
    static void (*send_call)(int) = do_send;
    pthread_t t;
    void *r;
    said = 0; /* before the goodbye, for which there may be space at once */
    NEED(!pthread_create(&t, 0, sleeper, &send_call));
    struct pollfd full = {a, POLLOUT, 0};
    while (poll(&full, 1, 0)) nap(10);
    NEED(!pthread_cancel(t));
    /* (The goodbye waits for space.) */
    size_t got = 0;
    char end[3] = {0};
    while (memcmp(end, "bye", 3)) { /* the rest is zeros */
        ssize_t n = recv(b, buf, sizeof buf, 0);
        NEED(n > 0);
        for (ssize_t k = 0; k < n; k++) end[0] = end[1], end[1] = end[2], end[2] = buf[k];
        got += (size_t)n;
    }
    NEED(!pthread_join(t, &r) && r == PTHREAD_CANCELED);
    NEED(got > 3 && recv(b, buf, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN);
}

static sigjmp_buf out;

static void leave(int sig) {
    (void)sig;
    siglongjmp(out, 1);
}

static volatile int turn;

static void jump(void (*call)(int)) {
    if (!sigsetjmp(out, 1)) {
        struct itimerval once = {{0, 0}, {0, 20000}};
        setitimer(ITIMER_REAL, &once, 0);
        call(a);
        NEED(!"came back");
    }
}

int main(void) {
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    listener = socket(AF_INET, SOCK_STREAM, 0);
    NEED(!bind(listener, (void *)&at, sizeof at) && !listen(listener, 100));
    getsockname(listener, (void *)&at, &len);
    signal(SIGUSR1, count);
    signal(SIGALRM, leave);
    ep = epoll_create1(0);

    /* Before the other end is there, so on TCP: whoever has left the call is not counted inside. */
    for (turn = 0; turn < 6; turn++) {
        a = dial();
        void (**call)(int) = &calls[(int[]){0, 1, 4}[turn % 3]];
        if (turn < 3) {
            pthread_t t;
            void *r;
            NEED(!pthread_create(&t, 0, sleeper, call));
            nap(40);
            NEED(!pthread_cancel(t) && !pthread_join(t, &r) && r == PTHREAD_CANCELED);
        } else {
            jump(*call);
        }
        b = accept(listener, 0, 0);
        NEED(b >= 0);
        char x[3];
        if (turn < 3) NEED(recv(b, x, 3, MSG_WAITALL) == 3 && !memcmp(x, "bye", 3));
        exchange(200);
        close(a), close(b);
    }

    /* On a lane. */
    a = dial();
    b = accept(listener, 0, 0);
    exchange(60);
    struct epoll_event ev = {EPOLLIN, {.fd = a}};
    NEED(!epoll_ctl(ep, EPOLL_CTL_ADD, a, &ev));
    for (int k = 0; k < CALLS; k++) {
        cancel(&calls[k]);
        exchange(10);
    }
    for (turn = 0; turn < CALLS; turn++) {
        jump(calls[turn]);
        exchange(10);
    }

    /* Somebody else sleeps on the same link group: his bytes find him. */
    int c = dial(), d = accept(listener, 0, 0);
    NEED(d >= 0);
    for (int k = 0; k < 4; k++) {
        pthread_t t;
        char x[8] = {0};
        int fd = c;
        for (int n = 0; n < 30; n++) {
            NEED(send(c, x, 8, 0) == 8 && recv(d, x, 8, MSG_WAITALL) == 8);
            NEED(send(d, x, 8, 0) == 8 && recv(c, x, 8, MSG_WAITALL) == 8);
        }
        if (k % 2) NEED(!pthread_create(&t, 0, other, &fd));
        if (k % 2) nap(20);
        pthread_t s;
        void *r;
        NEED(!pthread_create(&s, 0, sleeper, &calls[0]));
        nap(20);
        if (k % 2 == 0) NEED(!pthread_create(&t, 0, other, &fd));
        nap(20);
        NEED(!pthread_cancel(s) && !pthread_join(s, &r));
        NEED(recv(b, x, 3, MSG_WAITALL) == 3);
        NEED(send(d, x, 8, 0) == 8);
        NEED(!pthread_join(t, 0));
    }
    flood();
    exchange(10);
    printf("result ok\n");
    return 0;
}
