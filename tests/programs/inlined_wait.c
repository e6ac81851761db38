/* An epoll set that is filled by the C library's functions, and waited for by calls with the processor's own instruction (Bun).
 * It is told what it would be told, in time.
 *
 *     inlined_wait MESSAGES
 */
#define _GNU_SOURCE
#include "pairs.h"
#include <fcntl.h>
#include <sys/epoll.h>

int main(int argc, char **argv) {
    NEED(argc == 2);
    int a, b, ep = epoll_create1(0);
    struct epoll_event e = {.events = EPOLLIN, .data.u64 = 42}, got;
    char c[16];
    dial(&a, &b);
    NEED(!fcntl(b, F_SETFL, O_NONBLOCK));
    NEED(!epoll_ctl(ep, EPOLL_CTL_ADD, b, &e));
    for (int i = 0; i < atoi(argv[1]); i++) {
        NEED(send(a, "x", 1, 0) == 1);
        NEED(raw(SYS_epoll_wait, ep, (long)&got, 1, 20000, 0) == 1 && got.data.u64 == 42 && got.events == EPOLLIN);
        NEED(recv(b, c, sizeof c, 0) == 1 && send(b, "y", 1, 0) == 1 && recv(a, c, 1, 0) == 1);
        if (i % 100 == 0) sleep_us(1000);
    }
    /* Seen at last: the lane comes. */
    NEED(epoll_wait(ep, &got, 1, 0) == 0);
    int lane = 0;
    for (int i = 0; i < 20000 && !lane && getenv("LD_PRELOAD"); i++) {
        NEED(send(a, "x", 1, 0) == 1);
        NEED(epoll_wait(ep, &got, 1, 20000) == 1 && got.data.u64 == 42);
        NEED(recv(b, c, sizeof c, 0) == 1 && send(b, "y", 1, 0) == 1 && recv(a, c, 1, 0) == 1);
        lane = by_lane(a, b) && by_lane(b, a);
        sleep_us(1000);
    }
    NEED(lane || !getenv("LD_PRELOAD"));
    puts("result ok");
}
