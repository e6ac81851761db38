/* Programs that close whatever they find, by calls that the shim sees or does not see, and go on.
 *
 *     cleanup seen|unseen
 *
 * seen: each number that `fcntl` finds is closed, which succeeds. unseen: inlined calls close all numbers that there
 * are, others of them than the program's own; what it puts at these numbers afterwards is its own.
 */
#define _GNU_SOURCE
#include "pairs.h"
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/mman.h>

#define NUMBERS 70000

static int numbers[NUMBERS], count;

static int is_open(int fd) {
    return raw(SYS_fcntl, fd, F_GETFD, 0, 0, 0) >= 0;
}

static void *writer(void *fd) {
    sleep_us(10000);
    NEED(send((int)(long)fd, "k", 1, 0) == 1);
    return 0;
}

/* A connection, whose end is waited for in three ways. */
static void use(int to_be_warm) {
    int a, b, ep = epoll_create1(0);
    char c = 0;
    dial(&a, &b);
    if (to_be_warm) warm(a, b);
    for (int k = 0; k < 50; k++) by_lane(a, b), by_lane(b, a);
    struct epoll_event ev = {EPOLLIN, {0}};
    struct pollfd p = {b, POLLIN, 0};
    NEED(!epoll_ctl(ep, EPOLL_CTL_ADD, b, &ev));
    for (int k = 0; k < 6; k++) {
        pthread_t t;
        NEED(!pthread_create(&t, 0, writer, (void *)(long)a));
        if (k % 3 == 1) NEED(poll(&p, 1, -1) == 1);
        if (k % 3 == 2) NEED(epoll_wait(ep, &ev, 1, -1) == 1);
        NEED(recv(b, &c, 1, 0) == 1 && c == 'k' && !pthread_join(t, 0));
    }
    NEED(!close(a) && recv(b, &c, 1, 0) == 0 && !close(b) && !close(ep));
}

int main(int argc, char **argv) {
    NEED(argc == 2);
    int seen = !strcmp(argv[1], "seen"), a, b;
    alarm(60);
    use(1);
    dial(&a, &b);
    warm(a, b);
    for (int fd = 3; fd < NUMBERS; fd++) {
        if (seen && fcntl(fd, F_GETFD) >= 0) NEED(!close(fd));
        if (!seen && is_open(fd)) {
            NEED(!raw(SYS_close, fd, 0, 0, 0, 0));
            numbers[count++] = fd;
        }
    }
    listener = -1;
    address.sin_port = 0;
    int file = memfd_create("file", 0);
    NEED(file >= 0);
    for (int round = 0; round < 3; round++) {
        for (int k = 0; k < count; k++) {
            int fd = numbers[k];
            if (fd == file) continue;
            if (round == 1) NEED(fcntl(file, F_DUPFD, fd) == fd);
            else NEED(dup2(file, fd) == fd);
            NEED(fcntl(fd, F_GETFD) == 0 && write(fd, "x", 1) == 1);
            if (round == 2) NEED(!close_range(fd, fd, 0));
            else NEED(!close(fd));
            NEED(!is_open(fd));
        }
    }
    NEED(!close(file));
    use(seen);
    use(seen);
    puts("result ok");
}
