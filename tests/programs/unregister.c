/* Connections that are put into an epoll set and taken out of it again and again by one thread, while
 * others make the calls that give them their lanes.
 *
 *     unregister CONNECTIONS [once]
 *
 * Four threads dial, one after the other, their share of the connections to an echo server, and ask the same
 * set, in which each connection is left when it has its lane: it has to report it, with its echo, and no other.
 *
 * once: each registration is a new one, one-shot, in a set of its own, and is asked for one echo.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
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

#include "lanes.h"

#define THREADS 4
#define TURNS 300

static int port, ep, share;
static atomic_long echoes;

static void need(int ok, const char *what) {
    if (ok) return;
    fprintf(stderr, "FAILED %s: %s\n", what, strerror(errno));
    abort();
}

static void exchange(int fd, int n) {
    char b[64];
    memset(b, n, sizeof b);
    need(send(fd, b, sizeof b, MSG_NOSIGNAL) == sizeof b, "send");
    need(recv(fd, b, sizeof b, MSG_WAITALL) == sizeof b && b[0] == (char)n, "recv");
    atomic_fetch_add(&echoes, 1);
}

static int dial(void) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port)};
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    need(fd >= 0 && !connect(fd, (void *)&a, sizeof a), "connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return fd;
}

static void *worker(void *arg) {
    int id = (int)(long)arg;
    for (int n = 0; n < share; n++) {
        int fd = dial();
        struct epoll_event ev = {EPOLLIN, {.u64 = id}}, got[THREADS * 2];
        exchange(fd, n);
        struct moved before = {0};
        for (int k = 0, there = !under_shim(); k < TURNS || !there; k++) {
            if (k >= TURNS) usleep(1000); /* who gives the lane has to get its turn */
            if (k % 16 == 0) before = moved(fd);
            need(!epoll_ctl(ep, EPOLL_CTL_ADD, fd, &ev), "ADD");
            if (k % 16 == 0) exchange(fd, n);
            if (k % 16 == 0) there |= still(fd, before);
            if (k % 8 == 0) need(epoll_wait(ep, got, THREADS * 2, 0) >= 0, "epoll_wait");
            need(!epoll_ctl(ep, EPOLL_CTL_DEL, fd, &ev), "DEL");
        }
        need(!epoll_ctl(ep, EPOLL_CTL_ADD, fd, &ev), "the last ADD");
        need(send(fd, "x", 1, MSG_NOSIGNAL) == 1, "send");
        for (int mine = 0; !mine;) {
            int k = epoll_wait(ep, got, THREADS * 2, 5000);
            need(k > 0, "nothing is reported");
            while (k--) mine |= (int)got[k].data.u64 == id;
        }
        char b;
        need(recv(fd, &b, 1, MSG_DONTWAIT) == 1 && b == 'x', "the echo of what was reported");
        need(!close(fd), "close");
    }
    return 0;
}

static void *once(void *arg) {
    int set = epoll_create1(0);
    for (int n = 0; n < share; n++) {
        int fd = dial();
        struct epoll_event ev = {EPOLLIN | EPOLLONESHOT, {.u64 = n}}, got;
        struct moved before = {0};
        for (int k = 0, there = !under_shim(); k < TURNS / 4 || !there; k++) {
            if (k >= TURNS) usleep(1000); /* who gives the lane has to get its turn */
            if (k % 16 == 0) before = moved(fd);
            char b[64] = {0};
            need(!epoll_ctl(set, EPOLL_CTL_ADD, fd, &ev), "ADD");
            need(send(fd, b, sizeof b, MSG_NOSIGNAL) == sizeof b, "send");
            need(epoll_wait(set, &got, 1, 10000) == 1 && got.data.u64 == (unsigned)n, "nothing is reported");
            need(recv(fd, b, sizeof b, MSG_WAITALL) == sizeof b, "recv");
            atomic_fetch_add(&echoes, 1);
            if (k % 16 == 0) there |= still(fd, before);
            need(!epoll_ctl(set, EPOLL_CTL_DEL, fd, &ev), "DEL");
        }
        need(!close(fd), "close");
    }
    return arg;
}

/* Hears the daemon, too. */
static void *hears(void *arg) {
    struct epoll_event got;
    epoll_wait(ep, &got, 1, -1);
    return arg;
}

static void *echo(void *arg) {
    int fd = (int)(long)arg;
    char b[64];
    for (ssize_t r; (r = recv(fd, b, sizeof b, 0)) > 0;) need(send(fd, b, r, MSG_NOSIGNAL) == r, "echo");
    close(fd);
    return 0;
}

static int server(int l) {
    for (;;) {
        int fd = accept(l, 0, 0);
        need(fd >= 0, "accept");
        pthread_t t;
        pthread_create(&t, 0, echo, (void *)(long)fd);
        pthread_detach(t);
    }
}

int main(int argc, char **argv) {
    share = (argc > 1 ? atoi(argv[1]) : 400) / THREADS;
    struct sockaddr_in a = {.sin_family = AF_INET};
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t len = sizeof a;
    int l = socket(AF_INET, SOCK_STREAM, 0);
    need(!bind(l, (void *)&a, sizeof a) && !listen(l, 100), "listen");
    getsockname(l, (void *)&a, &len);
    port = ntohs(a.sin_port);
    pid_t child = fork();
    if (!child) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        return server(l);
    }
    ep = epoll_create1(0);
    alarm(60); /* a thread that never ends */
    int one_shot = argc > 2 && !strcmp(argv[2], "once");
    pthread_t t[THREADS], hearer;
    if (one_shot) {
        int idle = dial();
        struct epoll_event ev = {EPOLLIN, {.u64 = 0}};
        exchange(idle, 0);
        need(!epoll_ctl(ep, EPOLL_CTL_ADD, idle, &ev), "ADD");
        pthread_create(&hearer, 0, hears, 0);
    }
    for (long k = 0; k < THREADS; k++) pthread_create(&t[k], 0, one_shot ? once : worker, (void *)k);
    for (int k = 0; k < THREADS; k++) pthread_join(t[k], 0);
    kill(child, SIGKILL);
    waitpid(child, 0, 0);
    printf("result ok %ld\n", atomic_load(&echoes));
    return 0;
}
