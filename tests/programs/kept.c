/* A reset has come, and nobody was told of it yet: whoever gets the connection next is, once, whatever looks were made
 * meanwhile.
 *
 *     kept
 */
#define _GNU_SOURCE
#include "pairs.h"
#include <poll.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/wait.h>
#include <unistd.h>

static char *self;

/* The error, and then the end. */
static void told(int fd) {
    char c;
    NEED(recv(fd, &c, 1, MSG_DONTWAIT) == -1 && errno == ECONNRESET);
    NEED(recv(fd, &c, 1, MSG_DONTWAIT) == 0);
}

static int waited(pid_t child) {
    int status;
    NEED(waitpid(child, &status, 0) == child);
    return status;
}

static void look(int how, int fd, int set) {
    struct pollfd p = {fd, POLLIN, 0};
    struct epoll_event e;
    struct timeval none = {0, 0};
    fd_set in;
    int n;
    switch (how) {
    case 1: NEED(poll(&p, 1, 1000) == 1 && p.revents & POLLERR); break;
    case 2: NEED(epoll_wait(set, &e, 1, 1000) == 1 && e.events & EPOLLERR); break;
    case 3:
        FD_ZERO(&in);
        FD_SET(fd, &in);
        NEED(select(fd + 1, &in, 0, 0, &none) == 1);
        break;
    case 4: NEED(!ioctl(fd, FIONREAD, &n) && n == 0); break;
    }
}

static void send_fd(int to, int fd) {
    char room[CMSG_SPACE(sizeof fd)] = {0}, c = 0;
    struct iovec v = {&c, 1};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    struct cmsghdr *h = CMSG_FIRSTHDR(&m);
    h->cmsg_level = SOL_SOCKET, h->cmsg_type = SCM_RIGHTS, h->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(h), &fd, sizeof fd);
    NEED(sendmsg(to, &m, 0) == 1);
}

static int receive_fd(int from) {
    char room[CMSG_SPACE(sizeof(int))], c;
    struct iovec v = {&c, 1};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    NEED(recvmsg(from, &m, 0) == 1 && CMSG_FIRSTHDR(&m));
    int fd;
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof fd);
    return fd;
}

static void hand_on(int how, int fd, int set) {
    char number[16], command[600];
    struct pollfd p = {set, POLLIN, 0};
    struct epoll_event e = {.events = EPOLLIN, .data.u64 = 7};
    int ends[2], outer = epoll_create1(0);
    snprintf(number, sizeof number, "%d", fd);
    switch (how) {
    case 0:
        execl(self, self, number, NULL);
        NEED(0);
        return;
    case 1: /* a child consumes it */
        snprintf(command, sizeof command, "exec %s %d", self, fd);
        NEED(system(command) == 0 && recv(fd, command, 1, MSG_DONTWAIT) == 0);
        return;
    case 2:
        NEED(!socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
        pid_t child = fork();
        if (!child) {
            close(fd);
            told(receive_fd(ends[1]));
            _exit(0);
        }
        send_fd(ends[0], fd);
        close(fd);
        NEED(waited(child) == 0);
        return;
    case 3: /* the set is polled, from now on */
        NEED(poll(&p, 1, 1000) == 1 && epoll_wait(set, &e, 1, 1000) == 1 && e.events & EPOLLERR);
        break;
    case 4: /* or in another one */
        NEED(!epoll_ctl(outer, EPOLL_CTL_ADD, set, &e) && epoll_wait(outer, &e, 1, 1000) == 1);
        NEED(epoll_wait(set, &e, 1, 1000) == 1 && e.events & EPOLLERR);
        break;
    }
    told(fd);
}

static void run(int way, int looks, int then) {
    int a, b, set = epoll_create1(0);
    struct epoll_event e = {.events = EPOLLIN};
    struct linger at_once = {1, 0};
    dial(&a, &b);
    NEED(epoll_wait(set, &e, 1, 0) == 0); /* before which nothing in it gets a lane */
    NEED(!epoll_ctl(set, EPOLL_CTL_ADD, b, &e));
    warm(a, b);
    if (way == 0) NEED(!setsockopt(a, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once));
    else NEED(send(b, "unread", 6, 0) == 6);
    sleep_us(1000);
    close(a);
    sleep_us(1000);
    look(looks, b, set);
    hand_on(then, b, set);
}

int main(int argc, char **argv) {
    if (argc == 2) {
        told(atoi(argv[1]));
        return 0;
    }
    self = argv[0];
    for (int way = 0; way < 2; way++) {
        for (int looks = 0; looks < 5; looks++) {
            for (int then = 0; then < 5; then++) {
                pid_t child = fork();
                if (!child) {
                    run(way, looks, then);
                    _exit(0);
                }
                if (waited(child) != 0) {
                    fprintf(stderr, "way %d, look %d, then %d\n", way, looks, then);
                    return 1;
                }
            }
        }
    }
    puts("result ok");
}
