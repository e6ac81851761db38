/* Who hears what a set has to tell while its connections get their lanes.
 *
 *     heard away | many
 *
 * away: two things happen at a time, and each is heard by one of two threads, though who is told of one is away then.
 * many: a set hears very many other processes, each on its lane; then some of them go, and as many others come.
 * Prints "result ok".
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
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
#include <sys/wait.h>
#include <unistd.h>

#include "lanes.h"

#define NEED(ok) \
    do { \
        if (!(ok)) { \
            fprintf(stderr, "FAILED line %d: %s (errno %d)\n", __LINE__, #ok, errno); \
            _exit(1); \
        } \
    } while (0)
#define SOON 10000 /* ms */
#define ROUNDS 600
#define PEERS 650
#define BOTH 3

static int port;

static void exchange(int fd) {
    char b[64] = {0};
    NEED(send(fd, b, sizeof b, MSG_NOSIGNAL) == sizeof b);
    NEED(recv(fd, b, sizeof b, MSG_WAITALL) == sizeof b);
}

/* Messages until they travel on a lane. */
static void settle(int fd) {
    for (int turn = 0, there = !under_shim(); !there; turn++) {
        NEED(turn < SOON);
        struct moved before = moved(fd);
        exchange(fd);
        there = turn > 2 && still(fd, before);
        usleep(1000);
    }
}

static int dial(void) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port)};
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    NEED(fd >= 0 && !connect(fd, (void *)&a, sizeof a));
    NEED(!setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one));
    return fd;
}

static int listening(void) {
    struct sockaddr_in a = {.sin_family = AF_INET};
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t len = sizeof a;
    int l = socket(AF_INET, SOCK_STREAM, 0);
    NEED(l >= 0 && !bind(l, (void *)&a, sizeof a) && !listen(l, PEERS));
    getsockname(l, (void *)&a, &len);
    port = ntohs(a.sin_port);
    return l;
}

static void *echo(void *arg) {
    int fd = (int)(long)arg;
    char b[64];
    for (ssize_t n; (n = recv(fd, b, sizeof b, 0)) > 0;) NEED(send(fd, b, n, MSG_NOSIGNAL) == n);
    close(fd);
    return 0;
}

static void add(int ep, int fd, unsigned events, unsigned data) {
    struct epoll_event ev = {events, {.u32 = data}};
    NEED(!epoll_ctl(ep, EPOLL_CTL_ADD, fd, &ev));
}

static atomic_int turn, over, set;
static atomic_uint heard;

/* Waits in the set until this thread is the first to hear something, or all is heard; then it is away until all is. */
static void *hearer(void *arg) {
    for (int t = 1; t <= ROUNDS; t++) {
        while (atomic_load(&turn) < t) usleep(20);
        for (unsigned first = 0; !first && atomic_load(&heard) != BOTH;) {
            struct epoll_event ev[4];
            int n = epoll_wait(atomic_load(&set), ev, 4, -1);
            NEED(n > 0);
            while (n--) first |= ev[n].data.u32 & ~atomic_fetch_or(&heard, ev[n].data.u32);
        }
        for (int k = 0; atomic_load(&heard) != BOTH; k++) {
            NEED(k < SOON);
            usleep(1000);
        }
        atomic_fetch_add(&over, 1);
    }
    return arg;
}

static void away(void) {
    pthread_t t[2];
    for (int k = 0; k < 2; k++) NEED(!pthread_create(&t[k], 0, hearer, 0));
    for (int k = 1; k <= ROUNDS; k++) {
        int ep = epoll_create1(0), fd = dial(), pipes[2];
        NEED(!pipe(pipes));
        add(ep, pipes[0], EPOLLIN | EPOLLONESHOT, 1);
        atomic_store(&heard, 0);
        atomic_store(&set, ep);
        atomic_store(&turn, k);
        if (k & 1) add(ep, fd, EPOLLIN, 2);
        char b[64] = {0};
        NEED(send(fd, b, sizeof b, MSG_NOSIGNAL) == sizeof b);
        if (!(k & 1)) add(ep, fd, EPOLLIN, 2);
        for (volatile int spin = 0; spin < k % 64 * 2000; spin++) {} /* the lane comes before, after, or now */
        NEED(write(pipes[1], "x", 1) == 1);
        while (atomic_load(&over) < 2 * k) usleep(20);
        NEED(recv(fd, b, sizeof b, MSG_WAITALL) == sizeof b);
        if (k % 16 == 0) settle(fd);
        close(fd), close(ep), close(pipes[0]), close(pipes[1]);
    }
    for (int k = 0; k < 2; k++) pthread_join(t[k], 0);
}

static void one(int ep, unsigned data) {
    struct epoll_event ev[8];
    NEED(epoll_wait(ep, ev, 8, SOON) == 1 && ev[0].data.u32 == data);
}

static int fds[PEERS], mother[2];

/* Makes a process for each byte that it is sent, each with a connection on which it answers. (They must have none of the
 * other connections.) */
static void mothers(int l) {
    NEED(!pipe(mother));
    if (fork()) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    signal(SIGCHLD, SIG_IGN);
    close(l);
    for (char b; read(mother[0], &b, 1) == 1;) {
        pid_t child = fork();
        NEED(child >= 0);
        if (child) continue;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        echo((void *)(long)dial());
        _exit(0);
    }
    _exit(0);
}

/* Another process. The set knows its connection by this number. */
static void peer(int l, int ep, unsigned k) {
    NEED(write(mother[1], "x", 1) == 1);
    NEED((fds[k] = accept(l, 0, 0)) >= 0);
    settle(fds[k]);
    add(ep, fds[k], EPOLLIN, k);
}

/* A message of its own to each, and what comes back. Returns how many were on TCP. */
static int asked(int ep, unsigned round) {
    int tcp = 0;
    for (unsigned k = 0; k < PEERS; k++) {
        unsigned b[16], back[16];
        for (unsigned n = 0; n < 16; n++) b[n] = (round * PEERS + k) * 2654435761u + n;
        struct moved before = moved(fds[k]);
        NEED(send(fds[k], b, sizeof b, MSG_NOSIGNAL) == sizeof b);
        one(ep, k);
        NEED(recv(fds[k], back, sizeof back, MSG_WAITALL) == sizeof back && !memcmp(b, back, sizeof b));
        if (under_shim() && !still(fds[k], before)) fprintf(stderr, "TCP %u\n", k), tcp++;
    }
    return tcp;
}

static void gone(int ep, unsigned k) {
    NEED(!shutdown(fds[k], SHUT_WR));
    one(ep, k);
    close(fds[k]);
}

static void many(int l) {
    int ep = epoll_create1(0);
    struct rlimit files;
    NEED(!getrlimit(RLIMIT_NOFILE, &files));
    files.rlim_cur = files.rlim_max;
    NEED(!setrlimit(RLIMIT_NOFILE, &files));
    mothers(l);
    for (unsigned k = 0; k < PEERS; k++) peer(l, ep, k);
    asked(ep, 0); /* (When it is added, one may leave its lane for a moment.) */
    NEED(!asked(ep, 1));
    for (unsigned k = 0; k < PEERS; k += 5) gone(ep, k);
    for (unsigned k = 0; k < PEERS; k += 5) peer(l, ep, k);
    asked(ep, 2);
    NEED(!asked(ep, 3));
    for (unsigned k = 0; k < PEERS; k++) gone(ep, k);
}

int main(int argc, char **argv) {
    int l = listening();
    alarm(100);
    if (argc > 1 && !strcmp(argv[1], "many")) {
        many(l);
    } else {
        pid_t child = fork();
        if (!child) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            for (;;) {
                pthread_t t;
                int fd = accept(l, 0, 0);
                NEED(fd >= 0 && !pthread_create(&t, 0, echo, (void *)(long)fd) && !pthread_detach(t));
            }
        }
        away();
        kill(child, SIGKILL);
        waitpid(child, 0, 0);
    }
    printf("result ok\n");
    return 0;
}
