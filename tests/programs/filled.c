/* A connection with a lane whose buffers are filled between the moment in which it is added to a set and the first wait
 * on that: that there is room again is told, once they are read.
 *
 *     filled
 *
 * Both ends are one thread's. Prints "result ok".
 */
#define _GNU_SOURCE
#include <poll.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "pairs.h"

#define ROUNDS 8
#define WHOLE (1 << 20)

static char out[WHOLE], in[WHOLE];

/* Until the kernel takes no more. */
static long fill(int a) {
    struct pollfd p = {a, POLLOUT, 0};
    long all = 0, n;
    do {
        while ((n = send(a, out, WHOLE, MSG_DONTWAIT | MSG_NOSIGNAL)) > 0) all += n;
        NEED(n < 0 && errno == EAGAIN);
    } while (poll(&p, 1, 5));
    return all;
}

/* What can be read now. */
static long drain(int b) {
    long all = 0, n;
    while ((n = recv(b, in, WHOLE, MSG_DONTWAIT)) > 0) all += n;
    NEED(n < 0 && errno == EAGAIN);
    return all;
}

static void round_of(unsigned how, int again) {
    int a, b, ep = epoll_create1(EPOLL_CLOEXEC);
    dial(&a, &b);
    warm(a, b);
    struct epoll_event ev = {EPOLLIN | how, {.u64 = 7}}, got;
    NEED(!epoll_ctl(ep, EPOLL_CTL_ADD, a, &ev));
    if (again) { /* the number that is in the set is closed, and a copy of it stays */
        int copy = dup(a);
        NEED(copy >= 0 && !close(a));
        a = copy;
    }
    long sent = fill(a), read = 0;
    if (!again) {
        ev.events |= EPOLLOUT;
        NEED(!epoll_ctl(ep, EPOLL_CTL_MOD, a, &ev));
    }
    NEED(epoll_wait(ep, &got, 1, 0) == 0);
    read += drain(b);
    NEED(read > 0);
    NEED(epoll_wait(ep, &got, 1, 10000) == 1 && got.data.u64 == 7 && got.events & EPOLLOUT);
    for (struct pollfd p = {b, POLLIN, 0}; read < sent; read += drain(b)) {
        drain(a); /* (what is still to be put on TCP is, in any call) */
        NEED(poll(&p, 1, 10000) == 1);
    }
    NEED(read == sent);
    close(a), close(b), close(ep);
}

int main(void) {
    for (int k = 0; k < ROUNDS; k++) {
        round_of(0, 0);
        round_of(EPOLLET, 0);
        round_of(EPOLLET | EPOLLOUT, 1);
        round_of(EPOLLOUT, 1);
    }
    puts("result ok");
    return 0;
}
