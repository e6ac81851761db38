/* Many connections, and several threads in one set, while lanes come and go.
 *
 *     crowd CASE
 *
 * once: each connection is one-shot, and armed again by the thread that was told of it. edge: edge-triggered, read
 * to EAGAIN. both: each connection in two sets, and by a copy in one of them, level-triggered. churn: connections
 * are closed, replaced by dup2 and taken out by one thread while others wait and send.
 *
 * A server of threads sends numbered messages and waits for their echo, so that one event that is lost ends in the
 * alarm, and one that is told of twice meets another thread at work on the connection. Prints "result ok".
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define NEED(ok) \
    do { \
        if (!(ok)) { \
            fprintf(stderr, "FAILED line %d: %s (errno %d)\n", __LINE__, #ok, errno); \
            _exit(1); \
        } \
    } while (0)
#define CONNS 24
#define WORKERS 4
#define ROUNDS 400 /* per connection */
#define LIVES 4    /* connections per place */

static int over[2], port, ep, ep2, oneshot, edge, twice, churn, listener;
static atomic_int ended;
static struct place {
    atomic_int busy; /* a thread is at work on it */
    int fd, copy;
    pthread_mutex_t lock;
} place[65536];

/* The other end: a message, and its echo, and so on; then it waits for the end. */
static void *drive(void *arg) {
    unsigned id = (unsigned)(long)arg;
    for (int life = 0; life < LIVES; life++) {
        struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port)};
        a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
        NEED(fd >= 0 && !connect(fd, (void *)&a, sizeof a));
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        for (unsigned k = 0; k < ROUNDS; k++) {
            unsigned m[16] = {id, k}, got[16];
            NEED(send(fd, m, sizeof m, MSG_NOSIGNAL) == sizeof m);
            NEED(recv(fd, got, sizeof got, MSG_WAITALL) == sizeof got);
            NEED(!memcmp(m, got, sizeof m));
            if (k % 64 == 0) usleep(1000);
            if (k % 7 == 0) sched_yield();
        }
        close(fd);
    }
    return 0;
}

static void drivers(void) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    pthread_t t[CONNS];
    for (long k = 0; k < CONNS; k++) NEED(!pthread_create(&t[k], 0, drive, (void *)k));
    for (int k = 0; k < CONNS; k++) pthread_join(t[k], 0);
    _exit(0);
}

static unsigned events(void) {
    return EPOLLIN | EPOLLRDHUP | (oneshot ? EPOLLONESHOT : 0) | (edge ? EPOLLET : 0);
}

static void enter(int set, int op, int fd, int of) {
    struct epoll_event ev = {events(), {.u32 = (unsigned)of}};
    NEED(!epoll_ctl(set, op, fd, &ev));
}

/* Serves what there is. False: it has ended. */
static int serve(int fd) {
    unsigned m[16];
    for (;;) {
        ssize_t n = recv(fd, m, sizeof m, MSG_DONTWAIT);
        if (n < 0) {
            NEED(errno == EAGAIN);
            return 1;
        }
        if (n == 0) return 0;
        while (n < (ssize_t)sizeof m) { /* (a part, around a switch) */
            struct pollfd p = {fd, POLLIN, 0};
            NEED(poll(&p, 1, 10000) == 1);
            ssize_t more = recv(fd, (char *)m + n, sizeof m - n, MSG_DONTWAIT);
            NEED(more > 0 || errno == EAGAIN);
            if (more > 0) n += more;
        }
        NEED(send(fd, m, sizeof m, MSG_NOSIGNAL) == sizeof m);
        if (!edge) return 1;
    }
}

static void finish(int fd) {
    if (twice) close(place[fd].copy);
    NEED(!close(fd));
    if (atomic_fetch_add(&ended, 1) + 1 == CONNS * LIVES) NEED(write(over[1], "x", 1) == 1);
}

static void welcome(void) {
    int fd = accept4(listener, 0, 0, SOCK_NONBLOCK | SOCK_CLOEXEC), one = 1;
    if (fd < 0) {
        NEED(errno == EAGAIN);
        return;
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (churn) { /* it gets another number, which was registered a moment ago */
        int other = socket(AF_INET, SOCK_STREAM, 0);
        NEED(other >= 0);
        enter(ep2, EPOLL_CTL_ADD, fd, fd);
        NEED(dup2(fd, other) == other);
        struct epoll_event ev;
        NEED(!epoll_ctl(ep2, EPOLL_CTL_DEL, fd, &ev));
        close(fd);
        fd = other;
    }
    pthread_mutex_lock(&place[fd].lock);
    place[fd].fd = fd;
    if (twice) {
        NEED((place[fd].copy = dup(fd)) >= 0);
        enter(ep, EPOLL_CTL_ADD, place[fd].copy, fd);
        enter(ep2, EPOLL_CTL_ADD, fd, fd);
    }
    enter(ep, EPOLL_CTL_ADD, fd, fd);
    pthread_mutex_unlock(&place[fd].lock);
}

static void *worker(void *arg) {
    int set = twice && (long)arg % 2 ? ep2 : ep;
    for (;;) {
        struct epoll_event ev[4];
        int n = epoll_wait(set, ev, 1 + (long)arg % 4, -1);
        NEED(n > 0);
        for (int k = 0; k < n; k++) {
            int fd = (int)ev[k].data.u32;
            if (fd == over[0]) return 0;
            if (fd == listener) {
                welcome();
                continue;
            }
            struct place *p = &place[fd];
            if (oneshot) {
                NEED(!atomic_exchange(&p->busy, 1)); /* told of twice */
                int on = serve(fd);
                atomic_store(&p->busy, 0);
                if (on) enter(ep, EPOLL_CTL_MOD, fd, fd);
                else finish(fd);
                continue;
            }
            /* Several threads may be told of it, and it may have ended meanwhile. */
            pthread_mutex_lock(&p->lock);
            if (p->fd == fd) {
                if (churn && !epoll_ctl(ep, EPOLL_CTL_DEL, fd, 0)) enter(ep, EPOLL_CTL_ADD, fd, fd);
                if (!serve(fd)) p->fd = -1, finish(fd);
            }
            pthread_mutex_unlock(&p->lock);
        }
    }
}

int main(int argc, char **argv) {
    const char *how = argc > 1 ? argv[1] : "";
    oneshot = !strcmp(how, "once"), edge = !strcmp(how, "edge"), twice = !strcmp(how, "both");
    churn = !strcmp(how, "churn");
    struct sockaddr_in a = {.sin_family = AF_INET};
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t len = sizeof a;
    listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    NEED(listener >= 0 && !bind(listener, (void *)&a, sizeof a) && !listen(listener, 200));
    getsockname(listener, (void *)&a, &len);
    port = ntohs(a.sin_port);
    pid_t child = fork();
    if (!child) drivers();
    alarm(60);
    for (int k = 0; k < 65536; k++) pthread_mutex_init(&place[k].lock, 0), place[k].fd = -1;
    ep = epoll_create1(0), ep2 = epoll_create1(0);
    struct epoll_event ev = {EPOLLIN, {.u32 = (unsigned)listener}};
    NEED(!epoll_ctl(ep, EPOLL_CTL_ADD, listener, &ev) && !pipe(over));
    ev.data.u32 = (unsigned)over[0];
    NEED(!epoll_ctl(ep, EPOLL_CTL_ADD, over[0], &ev) && !epoll_ctl(ep2, EPOLL_CTL_ADD, over[0], &ev));
    pthread_t t[WORKERS];
    for (long k = 0; k < WORKERS; k++) NEED(!pthread_create(&t[k], 0, worker, (void *)k));
    for (int k = 0; k < WORKERS; k++) pthread_join(t[k], 0);
    int status;
    NEED(waitpid(child, &status, 0) == child && status == 0);
    printf("result ok %d\n", atomic_load(&ended));
    return 0;
}
