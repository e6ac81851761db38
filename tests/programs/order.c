/* epoll_wait lists what came first first: connections of a program with itself, plain TCP, and a listener.
 *
 *     order
 *
 * Connections are written to in an order drawn by lot, while nobody waits; then they are all listed at
 * once, and in pieces. Prints "result ok".
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define N 50
#define NEED(ok) \
    do { \
        if (!(ok)) { \
            fprintf(stderr, "FAILED line %d: %s (errno %d)\n", __LINE__, #ok, errno); \
            exit(1); \
        } \
    } while (0)

static int listener, to[N], from[N], ep;
static struct sockaddr_in at;
static socklen_t len = sizeof at;

static int dial(int *other) {
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    NEED(!connect(fd, (void *)&at, len));
    *other = accept(listener, 0, 0);
    NEED(*other >= 0);
    int on = 1; /* or the answer to a round decides when the next one goes out */
    NEED(!setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on));
    return fd;
}

static void watch(int fd, int number, unsigned events) {
    struct epoll_event ev = {events, {.u32 = (unsigned)number}};
    NEED(!epoll_ctl(ep, EPOLL_CTL_ADD, fd, &ev));
}

static void shuffle(int *order, int n) {
    for (int k = 0; k < n; k++) order[k] = k;
    for (int k = n - 1; k > 0; k--) {
        int j = rand() % (k + 1), t = order[k];
        order[k] = order[j], order[j] = t;
    }
}

/* Everything that is ready, at most `max` at a time, must come in this order. */
static void listed(const int *want, int n, int max, const char *what) {
    struct epoll_event evs[4 * N];
    char x[64];
    for (int k = 0; k < n;) {
        int got = epoll_wait(ep, evs, max, 1000);
        NEED(got > 0);
        for (int j = 0; j < got; j++, k++) {
            if (k >= n || (int)evs[j].data.u32 != want[k]) {
                fprintf(stderr, "%s, at most %d: event %d of %d:", what, max, k, n);
                for (int i = 0; i < got; i++) fprintf(stderr, " %u", evs[i].data.u32);
                fprintf(stderr, "\nnot:");
                for (int i = 0; i < n; i++) fprintf(stderr, " %d", want[i]);
                exit(1);
            }
            NEED(recv(from[want[k]], x, sizeof x, MSG_DONTWAIT) > 0);
        }
    }
}

static void rounds(unsigned events, const char *what) {
    int order[N], max[] = {4 * N, 7, 1};
    struct epoll_event evs[N];
    ep = epoll_create1(0);
    for (int k = 0; k < N; k++) watch(from[k], k, events);
    for (int r = 0; r < 9; r++) {
        shuffle(order, N);
        for (int k = 0; k < N; k++) NEED(send(to[order[k]], "x", 1, 0) == 1);
        /* More for some that are listed already changes nothing. */
        for (int k = 0; k < r; k++) NEED(send(to[order[k * 3]], "y", 1, 0) == 1);
        listed(order, N, max[r % 3], what);
        NEED(epoll_wait(ep, evs, N, 0) == 0); /* what was listed is looked at once more */
    }
    /* Few of many. */
    for (int r = 0; r < 20; r++) {
        int n = 2 + r % 5;
        shuffle(order, N);
        for (int k = 0; k < n; k++) NEED(send(to[order[k]], "z", 1, 0) == 1);
        listed(order, n, 4 * N, what);
        NEED(epoll_wait(ep, evs, N, 0) == 0);
    }
    close(ep);
}

/* Pipes and connections on TCP, beside one that is not: what the kernel lists keeps its order. */
static void mixed(void) {
    int pipes[N][2], order[N], lane = 0;
    struct epoll_event evs[4 * N];
    ep = epoll_create1(0);
    watch(from[0], 1000, EPOLLIN);
    for (int k = 0; k < N; k++) {
        NEED(!pipe(pipes[k]));
        watch(pipes[k][0], k, EPOLLIN);
    }
    for (int r = 0; r < 50; r++) {
        char x;
        shuffle(order, N);
        for (int k = 0; k < N; k++) {
            if (k == r) NEED(send(to[0], "x", 1, 0) == 1);
            NEED(write(pipes[order[k]][1], "x", 1) == 1);
        }
        for (int k = 0, tries = 0; k < N || !lane; tries++) {
            NEED(tries < 1000);
            int got = epoll_wait(ep, evs, 4 * N, 1000);
            NEED(got > 0);
            for (int j = 0; j < got; j++) {
                if (evs[j].data.u32 == 1000) {
                    NEED(recv(from[0], &x, 1, MSG_DONTWAIT) == 1);
                    lane = 1;
                    continue;
                }
                if (k >= N || (int)evs[j].data.u32 != order[k]) {
                    fprintf(stderr, "mixed: event %d is %u\n", k, evs[j].data.u32);
                    exit(1);
                }
                NEED(read(pipes[order[k++]][0], &x, 1) == 1);
            }
        }
        lane = 0;
        NEED(epoll_wait(ep, evs, N, 0) == 0);
    }
    close(ep);
}

int main(void) {
    cpu_set_t one;
    /* A kernel that leaves its work to several processors has an order on each. */
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    NEED(!sched_setaffinity(0, sizeof one, &one));
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    listener = socket(AF_INET, SOCK_STREAM, 0);
    NEED(!bind(listener, (void *)&at, sizeof at) && !listen(listener, 100));
    getsockname(listener, (void *)&at, &len);
    for (int k = 0; k < N; k++) to[k] = dial(&from[k]);
    char x[8];
    for (int r = 0; r < 150; r++) {
        for (int k = 0; k < N; k++) {
            NEED(send(to[k], "w", 1, 0) == 1 && recv(from[k], x, 1, 0) == 1);
            NEED(send(from[k], "w", 1, 0) == 1 && recv(to[k], x, 1, 0) == 1);
        }
        usleep(2000);
    }
    rounds(EPOLLIN, "level");
    rounds(EPOLLIN | EPOLLET, "edge");
    mixed();
    printf("result ok\n");
    return 0;
}
