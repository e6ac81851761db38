/* A send that may not wait takes on its lane what the kernel's buffers would, and no more than TCP takes when the connection
 * leaves.
 *
 *     whole_sends
 */
#define _GNU_SOURCE
#include "pairs.h"
#include <fcntl.h>
#include <poll.h>

enum { SIZE = 2000000, MOST = 64 << 20, ROUNDS = 400 };

static char sent[MOST], got[MOST];

static unsigned long on_tcp(int b) {
    return info(b).tcpi_bytes_received;
}

/* All that has come, in pieces. */
static void drain(int b, long left) {
    for (long at = 0; at < left;) {
        ssize_t n = recv(b, got + at, left - at < 65536 ? left - at : 65536, 0);
        NEED(n > 0);
        at += n;
    }
    NEED(!memcmp(got, sent, left));
}

/* Gives a copy of `fd` to nobody: the connection is one that other processes may hold, and leaves its lane. */
static void give_away(int fd) {
    int pair[2];
    char c = 'x', control[CMSG_SPACE(sizeof fd)] = {0};
    struct iovec v = {&c, 1};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *h = CMSG_FIRSTHDR(&m);
    h->cmsg_level = SOL_SOCKET, h->cmsg_type = SCM_RIGHTS, h->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(h), &fd, sizeof fd);
    NEED(!socketpair(AF_UNIX, SOCK_STREAM, 0, pair) && sendmsg(pair[0], &m, 0) == 1);
    close(pair[0]), close(pair[1]);
}

int main(void) {
    int a, b, shim = !!getenv("LD_PRELOAD"), round = 0;
    for (int k = 0; k < MOST; k++) sent[k] = (char)(k * 2654435761u >> 13);
    dial(&a, &b);
    warm(a, b);
    NEED(!fcntl(a, F_SETFL, O_NONBLOCK));
    unsigned long before;
    for (;; round++) {
        before = on_tcp(b);
        NEED(send(a, sent, SIZE, MSG_NOSIGNAL) == SIZE); /* nobody reads: the kernel has room for all of it */
        unsigned long passed = on_tcp(b) - before;
        if (!shim ? round == 3 : passed == 0) break;
        NEED(round < ROUNDS);
        drain(b, SIZE);
        sleep_us(15000);
    }
    /* No more than TCP's buffers: it all leaves with the connection. */
    long more = 0;
    for (ssize_t n; (n = send(a, sent + more, MOST - more, MSG_NOSIGNAL)) > 0;) more += n;
    NEED(errno == EAGAIN && more < MOST);
    if (shim) NEED(on_tcp(b) - before == 0); /* and it is on the lane still */
    give_away(a);
    drain(b, SIZE);
    drain(b, more);
    NEED(send(b, "b", 1, 0) == 1 && poll(&(struct pollfd){a, POLLIN, 0}, 1, 10000) == 1 && recv(a, got, 1, 0) == 1);
    close(a);
    NEED(recv(b, got, 1, 0) == 0);
    fprintf(stderr, "round %d, %ld more\n", round, more);
    printf("result ok\n");
    return 0;
}
