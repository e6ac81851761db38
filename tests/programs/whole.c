/* A message sent with MSG_DONTWAIT that the kernel's buffer holds is taken whole, although an epoll set has waited for
 * the end of `connect`: that says nothing of how its sender goes on after a short count.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MESSAGE = 800 << 10 /* more than two rings hold */ };
static char out[MESSAGE], in[MESSAGE];

static void need(int ok, const char *what) {
    if (ok) return;
    printf("FAILED %s: %s\n", what, strerror(errno));
    exit(1);
}

static void one(int n) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct epoll_event ev = {EPOLLOUT, {0}};
    socklen_t len = sizeof a;
    int listener = socket(AF_INET, SOCK_STREAM, 0), set = epoll_create1(0);
    need(!bind(listener, (void *)&a, sizeof a) && !listen(listener, 1), "listen");
    getsockname(listener, (void *)&a, &len);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    need(!connect(fd, (void *)&a, sizeof a) || errno == EINPROGRESS, "connect");
    need(!epoll_ctl(set, EPOLL_CTL_ADD, fd, &ev) && epoll_wait(set, &ev, 1, 20000) == 1, "connected");
    ev.events = EPOLLIN;
    need(!epoll_ctl(set, EPOLL_CTL_MOD, fd, &ev), "MOD");
    int peer = accept(listener, NULL, NULL);
    close(listener);
    for (int round = 0; round < 100; round++) {
        need(send(fd, out, 64, 0) == 64 && recv(peer, in, 64, MSG_WAITALL) == 64, "there");
        need(send(peer, out, 64, 0) == 64 && epoll_wait(set, &ev, 1, 20000) == 1, "an event");
        need(recv(fd, in, 64, 0) == 64, "back");
        usleep(round < 60 ? 300 : 0);
    }
    memset(out, 'a' + n, MESSAGE);
    need(send(fd, out, MESSAGE, MSG_DONTWAIT) == MESSAGE, "the whole message");
    need(recv(peer, in, MESSAGE, MSG_WAITALL) == MESSAGE && !memcmp(in, out, MESSAGE), "what was sent");
    close(fd);
    close(peer);
    close(set);
}

int main(void) {
    for (int n = 0; n < 8; n++) one(n);
    printf("result ok\n");
    return 0;
}
