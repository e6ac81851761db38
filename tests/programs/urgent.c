/* An urgent byte that was received by MSG_OOB is behind the next receive, although that finds nothing or the end: so
 * the close that follows makes no reset, which would cost the other end its own bytes' clean end.
 */
#define _GNU_SOURCE
#include "pairs.h"
#include <poll.h>

static void await(int fd, short events) {
    struct pollfd p = {fd, events, 0};
    NEED(poll(&p, 1, 20000) == 1);
}

/* `ended`: the sender of the urgent byte has shut down before the other end receives once more. */
static void one(int ended) {
    char b[100];
    int ends[2];
    dial(&ends[0], &ends[1]);
    for (int round = 0; round < 100; round++) {
        for (int k = 0; k < 2; k++) {
            NEED(send(ends[k], b, 64, 0) == 64);
            NEED(recv(ends[!k], b, 64, MSG_WAITALL) == 64);
        }
        usleep(round < 60 ? 300 : 0);
    }
    NEED(send(ends[0], "0123456789", 10, MSG_OOB) == 10);
    await(ends[1], POLLPRI);
    NEED(recv(ends[1], b, 1, MSG_OOB) == 1 && *b == '9');
    NEED(recv(ends[1], b, 9, MSG_WAITALL) == 9);
    if (ended) {
        shutdown(ends[0], SHUT_WR);
        await(ends[1], POLLRDHUP);
        NEED(recv(ends[1], b, 1, 0) == 0);
    } else {
        NEED(recv(ends[1], b, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN);
    }
    NEED(send(ends[1], "answer", 6, 0) == 6);
    close(ends[1]);
    await(ends[0], POLLRDHUP);
    struct pollfd p = {ends[0], POLLIN | POLLOUT | POLLRDHUP, 0};
    NEED(poll(&p, 1, 0) == 1 && !(p.revents & POLLERR));
    NEED(recv(ends[0], b, 10, MSG_WAITALL) == 6);
    NEED(recv(ends[0], b, 10, 0) == 0);
    close(ends[0]);
}

int main(void) {
    for (int n = 0; n < 6; n++) one(n % 2);
    printf("result ok\n");
    return 0;
}
