/* A server that keeps what TCP does not take in a queue of its own, and throws out who lets that fill up: no reader whom the
 * kernel's buffers would have borne with is thrown out.
 *
 *     queues
 *
 * It tries again before it gives up, without having been told of room.
 */
#define _GNU_SOURCE
#include "pairs.h"
#include <fcntl.h>
#include <pthread.h>
#include <sys/epoll.h>

enum { LIMIT = 32768, LINE = 300, LINES = 6000 };

static int a, b;

/* Takes a little now and then, so that the connection never stands still. */
static void *reader(void *none) {
    static char some[16384];
    for (long left = (long)LINE * LINES; left > 0;) {
        ssize_t n = recv(b, some, sizeof some, 0);
        NEED(n > 0);
        for (ssize_t k = 0; k < n; k++) NEED(some[k] == 'm');
        left -= n;
        sleep_us(5000);
    }
    return none;
}

static char queue[LIMIT];
static int filled;

static void flush(void) {
    while (filled > 0) {
        ssize_t n = send(a, queue, filled, 0);
        NEED(n > 0 || errno == EAGAIN);
        if (n < 0) return;
        memmove(queue, queue + n, filled -= n);
    }
}

int main(void) {
    int set = epoll_create1(0), watching = 0;
    struct epoll_event e = {.events = EPOLLIN}, got;
    dial(&a, &b);
    NEED(epoll_wait(set, &got, 1, 0) == 0);
    NEED(!fcntl(a, F_SETFL, O_NONBLOCK) && !epoll_ctl(set, EPOLL_CTL_ADD, a, &e));
    for (int k = 0; k < (getenv("LD_PRELOAD") ? 20000 : 3); k++) {
        char c;
        unsigned long before = info(b).tcpi_bytes_received;
        NEED(send(a, "w", 1, 0) == 1 && recv(b, &c, 1, 0) == 1);
        NEED(send(b, "w", 1, 0) == 1 && epoll_wait(set, &got, 1, 20000) == 1 && recv(a, &c, 1, 0) == 1);
        if (info(b).tcpi_bytes_received == before) break;
        sleep_us(1000);
    }
    pthread_t t;
    NEED(!pthread_create(&t, 0, reader, 0));
    int line = 0;
    for (; line < LINES; line++) {
        if (filled + LINE > LIMIT) flush();
        NEED(filled + LINE <= LIMIT); /* or it is thrown out */
        memset(queue + filled, 'm', LINE);
        filled += LINE;
        if (!watching) {
            e.events = EPOLLIN | EPOLLOUT;
            NEED(!epoll_ctl(set, EPOLL_CTL_MOD, a, &e));
            watching = 1;
        }
        if (epoll_wait(set, &got, 1, 0) == 1 && got.events & EPOLLOUT) flush();
        if (filled == 0) {
            e.events = EPOLLIN;
            NEED(!epoll_ctl(set, EPOLL_CTL_MOD, a, &e));
            watching = 0;
        }
    }
    NEED(!fcntl(a, F_SETFL, 0));
    flush();
    NEED(!pthread_join(t, 0));
    puts("result ok");
}
