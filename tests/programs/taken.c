/* Receives that take bytes and fail: the kernel cannot say whose they are, and they are gone. What comes after them
 * arrives all the same, whenever the connection gets a lane.
 *
 *     taken COUNT
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static void need(int ok, const char *what) {
    if (ok) return;
    printf("FAILED %s: %s\n", what, strerror(errno));
    exit(1);
}

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
    need(r == (how == 2 ? (long)sizeof b : -1) || (how == 2 && r == -1), "a receive that fails");
}

static void one(int n) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof a;
    struct timeval limit = {20, 0};
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    need(!bind(listener, (void *)&a, sizeof a) && !listen(listener, 1), "listen");
    getsockname(listener, (void *)&a, &len);
    int ends[2] = {socket(AF_INET, SOCK_STREAM, 0)};
    need(!connect(ends[0], (void *)&a, sizeof a), "connect");
    ends[1] = accept(listener, NULL, NULL);
    close(listener);
    for (int k = 0; k < 2; k++) setsockopt(ends[k], SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    for (int round = 0; round < 60; round++) {
        char out[64], in[64];
        memset(out, 'a' + round % 26, sizeof out);
        /* (Every fourth connection loses nothing.) */
        if (n % 4 && (round == n % 3 || round == 8 + n % 3)) {
            need(send(ends[0], "0123456789", 10, 0) == 10, "send");
            lose(ends[1], n % 4 - 1);
        }
        for (int k = 0; k < 2; k++) {
            need(send(ends[k], out, sizeof out, 0) == sizeof out, "send");
            need(recv(ends[!k], in, sizeof in, MSG_WAITALL) == sizeof in, "all that was sent");
            need(!memcmp(in, out, sizeof in), "the same bytes");
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
