/* An urgent byte that was received by MSG_OOB is behind the next receive, although that finds nothing or the end: so
 * the close that follows makes no reset, which would cost the other end its own bytes' clean end.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
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

static void await(int fd, short events) {
    struct pollfd p = {fd, events, 0};
    need(poll(&p, 1, 20000) == 1, "an event");
}

/* `ended`: the sender of the urgent byte has shut down before the other end receives once more. */
static void one(int ended) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof a;
    char b[100];
    int on = 1, listener = socket(AF_INET, SOCK_STREAM, 0);
    need(!bind(listener, (void *)&a, sizeof a) && !listen(listener, 1), "listen");
    getsockname(listener, (void *)&a, &len);
    int ends[2] = {socket(AF_INET, SOCK_STREAM, 0)};
    need(!connect(ends[0], (void *)&a, sizeof a), "connect");
    ends[1] = accept(listener, NULL, NULL);
    close(listener);
    for (int k = 0; k < 2; k++) setsockopt(ends[k], IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    for (int round = 0; round < 100; round++) {
        for (int k = 0; k < 2; k++) {
            need(send(ends[k], b, 64, 0) == 64, "send");
            need(recv(ends[!k], b, 64, MSG_WAITALL) == 64, "recv");
        }
        usleep(round < 60 ? 300 : 0);
    }
    need(send(ends[0], "0123456789", 10, MSG_OOB) == 10, "urgent");
    await(ends[1], POLLPRI);
    need(recv(ends[1], b, 1, MSG_OOB) == 1 && *b == '9', "the urgent byte");
    need(recv(ends[1], b, 9, MSG_WAITALL) == 9, "what comes before it");
    if (ended) {
        shutdown(ends[0], SHUT_WR);
        await(ends[1], POLLRDHUP);
        need(recv(ends[1], b, 1, 0) == 0, "the end");
    } else {
        need(recv(ends[1], b, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN, "nothing");
    }
    need(send(ends[1], "answer", 6, 0) == 6, "answer");
    close(ends[1]);
    await(ends[0], POLLRDHUP);
    struct pollfd p = {ends[0], POLLIN | POLLOUT | POLLRDHUP, 0};
    need(poll(&p, 1, 0) == 1 && !(p.revents & POLLERR), "no reset");
    need(recv(ends[0], b, 10, MSG_WAITALL) == 6, "the answer");
    need(recv(ends[0], b, 10, 0) == 0, "a clean end");
    close(ends[0]);
}

int main(void) {
    for (int n = 0; n < 6; n++) one(n % 2);
    printf("result ok\n");
    return 0;
}
