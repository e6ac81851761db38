/* Numbers of connections that calls nobody sees have closed: what has such a number next gets its own bytes,
 * however soon, and the connection none of them.
 *
 *     reused ROUNDS
 *
 * Prints "result ok".
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/mman.h>

#include "pairs.h"

/* Something new at the number of a connection's end `a`. The other end of it, or -1: a file. */
static int by_socketpair(int a) {
    int p[2];
    NEED(!raw(SYS_close, a, 0, 0, 0, 0));
    NEED(!socketpair(AF_UNIX, SOCK_STREAM, 0, p) && p[0] == a);
    return p[1];
}
static int by_pipe(int a) { /* whose reading end it is */
    int p[2];
    NEED(!raw(SYS_close, a, 0, 0, 0, 0));
    NEED(!pipe(p) && p[0] == a);
    return p[1];
}
static int by_memfd(int a) {
    NEED(!raw(SYS_close, a, 0, 0, 0, 0));
    NEED(memfd_create("file", 0) == a);
    return -1;
}
static int by_dup2(int a) {
    int p[2];
    NEED(!socketpair(AF_UNIX, SOCK_STREAM, 0, p));
    NEED(raw(SYS_dup2, p[0], a, 0, 0, 0) == a && !close(p[0]));
    return p[1];
}
static int by_fcntl(int a) {
    int p[2];
    NEED(!socketpair(AF_UNIX, SOCK_STREAM, 0, p));
    NEED(!raw(SYS_close, a, 0, 0, 0, 0) && fcntl(p[0], F_DUPFD, 0) == a && !close(p[0]));
    return p[1];
}

enum { PIPE = 1, DUP2 = 3, WAYS = 5 };
static int (*const ways[WAYS])(int) = {by_socketpair, by_pipe, by_memfd, by_dup2, by_fcntl};

static void has(int fd, const char *what, size_t n) {
    char b[64];
    struct pollfd p = {fd, POLLIN, 0};
    NEED(poll(&p, 1, 5000) == 1 && read(fd, b, sizeof b) == (ssize_t)n && !memcmp(b, what, n));
}

/* `how`: what is done with the number first. */
static void use(int a, int other, int way, int how) {
    char b[64];
    if (other < 0) {
        NEED(write(a, "for the file", 12) == 12 && lseek(a, 0, SEEK_CUR) == 12);
        return;
    }
    if (way == PIPE || how == 1 || how == 2) {
        NEED(write(other, "hello", 5) == 5);
        if (how == 2) has(a, "hello", 5);
        else NEED(read(a, b, 5) == 5 && !memcmp(b, "hello", 5));
    }
    if (way == PIPE) return;
    if (how == 3) {
        struct pollfd p = {a, POLLOUT, 0};
        NEED(poll(&p, 1, 5000) == 1 && p.revents == POLLOUT);
    }
    NEED(write(a, "for another", 11) == 11);
    has(other, "for another", 11);
    if (how == 4) NEED(!shutdown(a, SHUT_WR) && read(other, b, 1) == 0);
}

/* After some microseconds in other hands the number is given back by name. `copy`: another number of the connection stays. */
static void round_of(int way, int copy, int how) {
    int a, b, c = -1;
    char x;
    dial(&a, &b);
    if (copy) {
        c = fcntl(a, F_DUPFD, 100);
        NEED(c >= 100);
    }
    warm(a, b);
    NEED(send(a, "1", 1, 0) == 1 && recv(b, &x, 1, 0) == 1 && x == '1');
    NEED(send(b, "2", 1, 0) == 1 && recv(a, &x, 1, 0) == 1 && x == '2');
    int other = ways[way](a);
    if (way == DUP2) sleep_us(100); /* or within the 20 us in which the old proof holds */
    use(a, other, way, how);
    NEED(!close(a) && (other < 0 || !close(other)));
    if (copy) { /* which is what it was */
        NEED(send(c, "3", 1, 0) == 1 && recv(b, &x, 1, 0) == 1 && x == '3');
        NEED(send(b, "4", 1, 0) == 1 && recv(c, &x, 1, 0) == 1 && x == '4');
        NEED(!close(c));
    }
    NEED(recv(b, &x, 1, 0) == 0);
    NEED(!close(b));
}

int main(int argc, char **argv) {
    int rounds = argc > 1 ? atoi(argv[1]) : 1;
    alarm(100);
    for (int k = 0; k < rounds; k++)
        for (int way = 0; way < WAYS; way++)
            for (int how = 0; how < 5; how++)
                for (int copy = 0; copy < 2; copy++) {
                    if (getenv("VERBOSE")) fprintf(stderr, "way %d how %d copy %d\n", way, how, copy);
                    round_of(way, copy, how);
                }
    printf("result ok\n");
    return 0;
}
