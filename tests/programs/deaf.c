/* An end shuts both directions down, with bytes unread, in the very instant in which the other end leaves its lane:
 * what had come is still read, and both are told a clean end.
 *
 *     deaf ROUNDS
 *
 * Both ends are in this process. Prints "result ok".
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "lanes.h"

#define NEED(ok) \
    do { \
        if (!(ok)) { \
            fprintf(stderr, "FAILED line %d: %s (errno %d) in round %d, %d unread\n", __LINE__, #ok, errno, turn, unread); \
            exit(1); \
        } \
    } while (0)

static struct sockaddr_in at;
static socklen_t len = sizeof at;
static int listener, a, b, turn, unread;
static pthread_barrier_t both;
static char buf[8000], in[8000];
static unsigned seed = 1;

static unsigned any(unsigned n) {
    seed = seed * 1103515245 + 12345;
    return (seed >> 16) % n;
}

static void spin(int ns) {
    struct timespec t, u;
    clock_gettime(CLOCK_MONOTONIC, &t);
    do clock_gettime(CLOCK_MONOTONIC, &u);
    while ((u.tv_sec - t.tv_sec) * 1000000000L + u.tv_nsec - t.tv_nsec < ns);
}

static void exchange(void) {
    char x[64] = "", y[64];
    NEED(send(a, x, 64, 0) == 64 && recv(b, y, 64, MSG_WAITALL) == 64);
    NEED(send(b, x, 64, 0) == 64 && recv(a, y, 64, MSG_WAITALL) == 64);
}

static void until_on_lane(void) {
    for (int tries = 0;; tries++) {
        struct moved before = moved(a);
        exchange();
        if (tries >= 10 && (!under_shim() || still(a, before))) return;
        NEED(tries < 20000);
        if (tries % 8 == 7) {
            struct timespec t = {0, 500000};
            nanosleep(&t, 0);
        }
    }
}

static int how, waits;

/* The end that takes nothing any more. */
static void *shuts(void *none) {
    pthread_barrier_wait(&both);
    spin(waits);
    if (how) NEED(!shutdown(b, SHUT_WR) && !shutdown(b, SHUT_RD));
    else NEED(!shutdown(b, SHUT_RDWR));
    return none;
}

static void ended(int fd) {
    int told = -1;
    socklen_t n = sizeof told;
    NEED(recv(fd, in, sizeof in, 0) == 0);
    NEED(!getsockopt(fd, SOL_SOCKET, SO_ERROR, &told, &n) && !told);
}

int main(int argc, char **argv) {
    NEED(argc == 2);
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    listener = socket(AF_INET, SOCK_STREAM, 0);
    NEED(!bind(listener, (void *)&at, sizeof at) && !listen(listener, 5));
    NEED(!getsockname(listener, (void *)&at, &len));
    NEED(!pthread_barrier_init(&both, 0, 2));
    for (turn = 0; turn < atoi(argv[1]); turn++) {
        a = socket(AF_INET, SOCK_STREAM, 0);
        NEED(!connect(a, (void *)&at, len) && (b = accept(listener, 0, 0)) >= 0);
        until_on_lane();
        pthread_t t;
        int on = 1;
        unread = 1 + (int)any(sizeof buf), how = (int)any(2), waits = (int)any(40000);
        NEED(!pthread_create(&t, 0, shuts, 0));
        NEED(send(a, buf, (size_t)unread, 0) == unread);
        pthread_barrier_wait(&both);
        spin((int)any(20000));
        NEED(!setsockopt(a, SOL_SOCKET, SO_TIMESTAMP, &on, sizeof on)); /* no lane has this */
        NEED(!pthread_join(t, 0));
        for (int left = unread; left;) {
            ssize_t n = recv(b, in, sizeof in, 0);
            NEED(n > 0);
            left -= (int)n;
        }
        ended(b), ended(a);
        close(a), close(b);
    }
    printf("result ok\n");
    return 0;
}
