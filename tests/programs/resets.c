/* A peer that resets the connection, by any of the ways there are, with bytes on their way in both
 * directions and either of them on a lane, on TCP or in between: who survives is told all bytes that had
 * come, then ECONNRESET, then the end. Never an end at once, and never nothing.
 *
 *     resets SEED ROUNDS [behind]
 *
 * `behind`: it dies at once behind a send, of which nothing is acknowledged yet.
 *
 * Prints "result ok".
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define NEED(ok) \
    do { \
        if (!(ok)) { \
            fprintf(stderr, "FAILED line %d: %s (errno %d) in %s\n", __LINE__, #ok, errno, what); \
            exit(1); \
        } \
    } while (0)

static char what[200] = "the beginning";
static unsigned seed;

static unsigned any(unsigned n) {
    seed = seed * 1103515245 + 12345;
    return (seed >> 16) % n;
}

static void nap(int ms) {
    struct timespec t = {ms / 1000, ms % 1000 * 1000000L};
    nanosleep(&t, 0);
}

static char buf[1 << 20];

/* Byte `at` of either stream. */
static char byte(size_t at) {
    return (char)(at * 7 + at / 251);
}

static void put(int fd, size_t *at, size_t n) {
    for (size_t k = 0; k < n; k++) buf[k] = byte(*at + k);
    for (size_t k = 0; k < n;) {
        ssize_t r = send(fd, buf + k, n - k, 0);
        NEED(r > 0);
        k += (size_t)r;
    }
    *at += n;
}

static void get(int fd, size_t *at, size_t n) {
    while (n) {
        ssize_t r = recv(fd, buf, n < sizeof buf ? n : sizeof buf, 0);
        NEED(r > 0);
        for (ssize_t k = 0; k < r; k++) NEED(buf[k] == byte(*at + k));
        *at += (size_t)r, n -= (size_t)r;
    }
}

enum { LINGER, CLOSE, EXIT, KILL, WAYS };

/* What both ends do in a round. */
static struct {
    unsigned warm, rounds, more, reads, sends, way, wait, by, leaves, late;
} plan;

/* The end that resets. */
static void other(int fd, int go) {
    size_t in = 0, out = 0;
    for (unsigned k = 0; k < plan.rounds; k++) {
        if (plan.warm != 1) put(fd, &out, 64);
        if (plan.warm != 2) get(fd, &in, 64);
        nap(1);
    }
    if (plan.reads) get(fd, &in, plan.reads);
    if (plan.sends) put(fd, &out, plan.sends);
    char x;
    NEED(read(go, &x, 1) == 1);
    if (plan.way == LINGER) {
        struct linger l = {1, 0};
        NEED(!setsockopt(fd, SOL_SOCKET, SO_LINGER, &l, sizeof l));
    } else { /* with bytes unread */
        NEED(recv(fd, &x, 1, MSG_PEEK) == 1);
    }
    if (plan.way == KILL) kill(getpid(), SIGKILL);
    if (plan.way == EXIT) _exit(0);
    close(fd);
    _exit(0);
}

static void until_readable(int fd) {
    struct pollfd p = {fd, POLLIN, 0};
    fd_set s;
    FD_ZERO(&s);
    FD_SET(fd, &s);
    struct epoll_event ev = {EPOLLIN, {.fd = fd}};
    switch (plan.by) {
    case 1: NEED(poll(&p, 1, -1) == 1); break;
    case 2: NEED(select(fd + 1, &s, 0, 0, 0) == 1); break;
    case 3: {
        int ep = epoll_create1(0);
        NEED(!epoll_ctl(ep, EPOLL_CTL_ADD, fd, &ev) && epoll_wait(ep, &ev, 1, -1) == 1);
        close(ep);
    }
    }
}

/* With its end there, or while it comes, it goes by TCP from here on: no lane has this option. */
static void leave(int fd, int waits) {
    struct pollfd p = {fd, POLLRDHUP, 0};
    if (waits) NEED(poll(&p, 1, -1) == 1);
    int on = 1;
    NEED(!setsockopt(fd, SOL_SOCKET, SO_TIMESTAMP, &on, sizeof on));
}

static void survivor(int fd, int go) {
    size_t in = 0, out = 0;
    for (unsigned k = 0; k < plan.rounds; k++) {
        if (plan.warm != 2) put(fd, &out, 64);
        if (plan.warm != 1) get(fd, &in, 64);
        nap(1);
    }
    if (plan.late) { /* it acknowledges late: its window cannot grow, and nothing is to be quick */
        int no = 0, room = 16384;
        NEED(!setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &room, sizeof room));
        NEED(!setsockopt(fd, IPPROTO_TCP, TCP_QUICKACK, &no, sizeof no));
    }
    put(fd, &out, plan.more);
    if (plan.wait) nap(1 << plan.wait);
    NEED(write(go, "x", 1) == 1);
    if (plan.wait & 1) nap(10);
    if (plan.leaves) leave(fd, plan.leaves == 1);
    size_t all = in + plan.sends;
    int told = 0;
    if (plan.by >= 4) { /* told before the bytes, to who asks otherwise */
        struct pollfd p = {fd, 0, 0};
        while (!(p.revents & POLLERR)) NEED(poll(&p, 1, -1) == 1);
        if (plan.by == 4) {
            socklen_t l = sizeof told;
            NEED(!getsockopt(fd, SOL_SOCKET, SO_ERROR, &told, &l) && told == ECONNRESET);
        } else {
            NEED(send(fd, buf, 10, 0) == -1 && errno == ECONNRESET);
        }
        told = 1;
    }
    for (;;) {
        if (!told) until_readable(fd);
        ssize_t r = recv(fd, buf, 1 + any(20000), 0);
        if (told ? !r : r < 0 && errno == ECONNRESET) break;
        NEED(r > 0);
        for (ssize_t k = 0; k < r; k++) NEED(buf[k] == byte(in + k));
        in += (size_t)r;
        NEED(in <= all);
    }
    snprintf(what + strlen(what), 40, ": %zu of %zu", in, all);
    NEED(in == all);
    for (int k = 0; k < 3; k++) NEED(recv(fd, buf, 10, 0) == 0);
    NEED(send(fd, buf, 10, MSG_NOSIGNAL) == -1 && errno == EPIPE);
}

static void late(int sig) {
    (void)sig;
    (void)!write(2, what, strlen(what));
    (void)!write(2, ": in vain\n", 10);
    _exit(1);
}

int main(int argc, char **argv) {
    NEED(argc == 3 || argc == 4);
    signal(SIGALRM, late);
    seed = (unsigned)atoi(argv[1]);
    struct sockaddr_in at = {.sin_family = AF_INET};
    socklen_t len = sizeof at;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    NEED(!bind(listener, (void *)&at, sizeof at) && !listen(listener, 5));
    getsockname(listener, (void *)&at, &len);
    for (int k = 0; k < atoi(argv[2]); k++) {
        plan.warm = any(3), plan.rounds = 30 + any(10), plan.way = any(WAYS);
        plan.more = 1 + any(any(2) ? 300000 : 3000);
        plan.reads = any(2) ? any(plan.more) : 0;
        plan.sends = any(2) ? any(30000) : 0;
        plan.wait = any(6), plan.by = any(6), plan.leaves = any(3);
        if ((plan.late = argc == 4)) {
            plan.warm = 1 + any(2), plan.way = EXIT + any(2), plan.by = 4 + any(2), plan.wait = plan.leaves = 0;
            plan.more = 20000 + any(100000), plan.reads = 1 + any(2000), plan.sends = 5000 + any(5000);
        }
        snprintf(what, sizeof what, "round %d: warm %u more %u reads %u sends %u way %u wait %u by %u leaves %u", k, plan.warm,
                 plan.more, plan.reads, plan.sends, plan.way, plan.wait, plan.by, plan.leaves);
        int go[2];
        NEED(!pipe(go));
        pid_t p = fork();
        if (!p) {
            close(listener), close(go[1]);
            int fd = socket(AF_INET, SOCK_STREAM, 0);
            NEED(!connect(fd, (void *)&at, sizeof at));
            other(fd, go[0]);
        }
        close(go[0]);
        int fd = accept(listener, 0, 0);
        alarm(20);
        survivor(fd, go[1]);
        alarm(0);
        close(fd), close(go[1]);
        int status;
        NEED(waitpid(p, &status, 0) == p && (plan.way == KILL ? WIFSIGNALED(status) : !status));
    }
    printf("result ok\n");
    return 0;
}
