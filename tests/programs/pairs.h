/* Connections of which one program holds both ends, for C programs of the tests. */
#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "raw.h"

static void failed(int line, const char *what) {
    fprintf(stderr, "FAILED line %d: %s (%s)\n", line, what, strerror(errno));
    abort();
}

#define NEED(ok) ((ok) ? (void)0 : failed(__LINE__, #ok))

static int listener = -1;
static struct sockaddr_in address;

/* `a` gets the lowest number that is free. */
static void dial(int *a, int *b) {
    socklen_t n = sizeof address;
    if (listener < 0) {
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        listener = socket(AF_INET, SOCK_STREAM, 0);
        NEED(!bind(listener, (void *)&address, n) && !listen(listener, 100));
        getsockname(listener, (void *)&address, &n);
    }
    *a = socket(AF_INET, SOCK_STREAM, 0);
    NEED(!connect(*a, (void *)&address, n));
    *b = accept(listener, 0, 0);
    NEED(*b >= 0);
    int one = 1;
    NEED(!setsockopt(*a, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one));
    NEED(!setsockopt(*b, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one));
}

static inline void sleep_us(long us) {
    struct timespec t = {us / 1000000, us % 1000000 * 1000};
    nanosleep(&t, 0);
}

/* TCP's buffers take this little from now on; no hook sees that. */
static inline void narrow(int fd, int bytes) {
    NEED(!raw(SYS_setsockopt, fd, SOL_SOCKET, SO_SNDBUF, (long)&bytes, sizeof bytes));
    NEED(!raw(SYS_setsockopt, fd, SOL_SOCKET, SO_RCVBUF, (long)&bytes, sizeof bytes));
}

/* A spawned program reads what its parent has sent to this end: bytes that count up. */
static inline int take_counted(int fd, int amount) {
    struct timeval limit = {10, 0};
    char buf[amount];
    NEED(!setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit));
    NEED(recv(fd, buf, amount, MSG_WAITALL) == amount);
    for (int i = 0; i < amount; i++) NEED(buf[i] == (char)i);
    return 0;
}

/* One byte from `a` to `b`. True: TCP has not seen it. */
static int by_lane(int a, int b) {
    char c = 0;
    unsigned long before = info(b).tcpi_bytes_received;
    NEED(send(a, "w", 1, 0) == 1 && recv(b, &c, 1, 0) == 1 && c == 'w');
    return info(b).tcpi_bytes_received == before;
}

/* Until both directions are on a lane; bare, a few times. */
static void warm(int a, int b) {
    int bare = !getenv("LD_PRELOAD");
    for (int k = 0; k < (bare ? 3 : 20000); k++) {
        int forth = by_lane(a, b), back = by_lane(b, a);
        if (forth && back) return;
        sleep_us(bare ? 0 : 1000);
    }
    NEED(bare);
}
