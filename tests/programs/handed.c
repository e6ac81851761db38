/* A connection whose other end has sent all it will, and has shut down or closed, is handed on with everything unread:
 * by exec, by spawn, over a Unix socket. Whoever gets it finds the bytes, then the end. And a process that takes them,
 * and exits without another call on the connection, has ended it cleanly.
 *
 *     handed
 *
 * Prints "result ok".
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "lanes.h"

#define NEED(ok) \
    do { \
        if (!(ok)) { \
            fprintf(stderr, "FAILED line %d: %s (errno %d) in %s\n", __LINE__, #ok, errno, what); \
            exit(1); \
        } \
    } while (0)

static char what[100] = "the beginning";
static const int sizes[] = {1, 3000, 50000, 200000};

enum { SHUT, CLOSE, ENDS };
enum { EXEC, SPAWN, RIGHTS, EXIT, WAYS };

static void put(int fd, char c) {
    char x[64];
    memset(x, c, sizeof x);
    NEED(send(fd, x, sizeof x, 0) == sizeof x);
}

static char get(int fd) {
    char x[64];
    NEED(recv(fd, x, sizeof x, MSG_WAITALL) == sizeof x && x[0] == x[63]);
    return x[0];
}

static unsigned char at_place(int i) { return (unsigned char)(i * 7 + i / 251); }

/* The end that sends everything. */
static void other(int fd, int size, int ends, int tell) {
    static unsigned char all[200000];
    for (char c = 0; c != 'l';) put(fd, c = get(fd));
    for (int i = 0; i < size; i++) all[i] = at_place(i);
    for (int n = 0; n < size;) {
        ssize_t k = send(fd, all + n, size - n, 0);
        NEED(k > 0);
        n += k;
    }
    if (ends == CLOSE) {
        NEED(!close(fd) && write(tell, "x", 1) == 1);
        _exit(0);
    }
    NEED(!shutdown(fd, SHUT_WR) && write(tell, "x", 1) == 1);
    char x;
    NEED(get(fd) == 'd');
    NEED(recv(fd, &x, 1, 0) == 0); /* no reset */
    _exit(0);
}

static void until_on_lane(int fd) {
    for (int tries = 0;; tries++) {
        struct moved before = moved(fd);
        put(fd, 'a');
        NEED(get(fd) == 'a');
        if (tries >= 20 && (!under_shim() || still(fd, before))) break;
        NEED(tries < 4000);
        struct timespec t = {0, 2000000};
        nanosleep(&t, 0);
    }
}

/* Who got the connection. */
static int finish(int fd, int size, int ends) {
    unsigned char b[4096];
    int n = 0;
    for (ssize_t k; (k = recv(fd, b, sizeof b, 0)); n += k) {
        NEED(k > 0);
        for (ssize_t i = 0; i < k; i++) NEED(b[i] == at_place(n + i));
    }
    NEED(n == size);
    if (ends == SHUT) put(fd, 'd');
    return 0;
}

static void over_a_socket(int fd, int size, int ends) {
    int s[2];
    char x, space[CMSG_SPACE(sizeof fd)] = {0};
    struct iovec v = {"x", 1};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    NEED(!socketpair(AF_UNIX, SOCK_STREAM, 0, s));
    pid_t p = fork();
    if (!p) {
        close(fd), close(s[0]); /* (the copy of the fork is none that counts) */
        v.iov_base = &x;
        NEED(recvmsg(s[1], &m, 0) == 1);
        memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof fd);
        _exit(finish(fd, size, ends));
    }
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    c->cmsg_level = SOL_SOCKET, c->cmsg_type = SCM_RIGHTS, c->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(c), &fd, sizeof fd);
    NEED(sendmsg(s[0], &m, 0) == 1);
    close(s[0]), close(s[1]);
    close(fd);
    int status;
    NEED(waitpid(p, &status, 0) == p && !status);
}

static void hand_on(const char *self, int way, int fd, int size, int ends) {
    char a[12], b[12], c[12];
    snprintf(a, sizeof a, "%d", fd), snprintf(b, sizeof b, "%d", size), snprintf(c, sizeof c, "%d", ends);
    char *args[] = {(char *)self, a, b, c, 0};
    extern char **environ;
    pid_t p = -1;
    int status;
    if (way == RIGHTS) return over_a_socket(fd, size, ends);
    if (way == EXIT) {
        for (char x; size--;) NEED(recv(fd, &x, 1, 0) == 1);
        if (ends == SHUT) put(fd, 'd');
        _exit(0);
    }
    if (way == SPAWN) NEED(!posix_spawn(&p, self, 0, 0, args, environ));
    if (way == EXEC && !(p = fork())) {
        execv(self, args);
        _exit(2);
    }
    close(fd);
    NEED(waitpid(p, &status, 0) == p && !status);
}

static void one(const char *self, int listener, int way, int ends, int size) {
    struct sockaddr_in at;
    socklen_t len = sizeof at;
    int told[2], status;
    NEED(!getsockname(listener, (void *)&at, &len) && !pipe2(told, O_CLOEXEC));
    pid_t p = fork();
    NEED(p >= 0);
    if (!p == (way != EXIT)) { /* (the one that stays is the one whose success is looked at) */
        close(listener), close(told[0]);
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        NEED(!connect(fd, (void *)&at, len));
        other(fd, size, ends, told[1]);
    }
    int fd = accept(listener, 0, 0);
    NEED(fd >= 0);
    until_on_lane(fd);
    put(fd, 'l');
    NEED(get(fd) == 'l');
    char x;
    close(told[1]);
    NEED(read(told[0], &x, 1) == 1); /* all is sent, nothing is read */
    close(told[0]);
    hand_on(self, way, fd, size, ends);
    NEED(waitpid(p, &status, 0) == p && !status);
}

int main(int argc, char **argv) {
    if (argc == 4) {
        snprintf(what, sizeof what, "what was executed");
        return finish(atoi(argv[1]), atoi(argv[2]), atoi(argv[3]));
    }
    struct sockaddr_in at = {.sin_family = AF_INET};
    socklen_t len = sizeof at;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    NEED(!bind(listener, (void *)&at, sizeof at) && !listen(listener, 5));
    NEED(!getsockname(listener, (void *)&at, &len));
    for (int way = 0; way < WAYS; way++)
        for (int ends = 0; ends < ENDS; ends++)
            for (unsigned k = 0; k < sizeof sizes / sizeof *sizes; k++) {
                snprintf(what, sizeof what, "way %d, end %d, %d bytes", way, ends, sizes[k]);
                pid_t p = fork();
                int status;
                if (!p) {
                    one(argv[0], listener, way, ends, sizes[k]);
                    _exit(0);
                }
                NEED(waitpid(p, &status, 0) == p && !status);
            }
    printf("result ok\n");
    return 0;
}
