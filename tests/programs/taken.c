/* Receives that take bytes and fail: the kernel cannot say whose they are, and they are gone. What comes after them
 * arrives all the same, whenever the connection gets a lane.
 *
 *     taken COUNT
 */
#define _GNU_SOURCE
#include "pairs.h"

/* Bytes are there: three ways to lose ten of them. */
static void lose(int fd, int how) {
    char b[10];
    struct iovec v = {b, sizeof b};
    struct sockaddr_in who;
    socklen_t negative = -1;
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_name = (void *)8, .msg_namelen = sizeof who};
    long r = -1;
    if (how == 0) r = recvfrom(fd, b, sizeof b, 0, (void *)&who, &negative);
    if (how == 1) r = recvfrom(fd, b, sizeof b, 0, (void *)&who, (void *)8);
    if (how == 2) r = recvmsg(fd, &m, 0);
    /* (A stream has no address to be stored: this one may succeed.) */
    NEED(r == (how == 2 ? (long)sizeof b : -1) || (how == 2 && r == -1));
}

static void one(int n) {
    struct timeval limit = {20, 0};
    int ends[2];
    dial(&ends[0], &ends[1]);
    for (int k = 0; k < 2; k++) setsockopt(ends[k], SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    for (int round = 0; round < 60; round++) {
        char out[64], in[64];
        memset(out, 'a' + round % 26, sizeof out);
        /* (Every fourth connection loses nothing.) */
        if (n % 4 && (round == n % 3 || round == 8 + n % 3)) {
            NEED(send(ends[0], "0123456789", 10, 0) == 10);
            lose(ends[1], n % 4 - 1);
        }
        for (int k = 0; k < 2; k++) {
            NEED(send(ends[k], out, sizeof out, 0) == sizeof out);
            NEED(recv(ends[!k], in, sizeof in, MSG_WAITALL) == sizeof in);
            NEED(!memcmp(in, out, sizeof in));
        }
        usleep(round < 30 ? 300 : 0); /* so that the daemon gets on */
    }
    close(ends[0]);
    close(ends[1]);
}

int main(int argc, char **argv) {
    for (int n = 0; n < (argc > 1 ? atoi(argv[1]) : 40); n++) one(n);
    printf("result ok\n");
    return 0;
}
