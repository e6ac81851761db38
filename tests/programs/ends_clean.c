/* A process that ends (exits, or is killed) with all bytes read, without another call on its connection, after the
 * other end has gone back to TCP: its end is an end of file, to whoever holds the other end then.
 *
 *     ends_clean
 *
 * Prints "result ok".
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
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
static const char *self;

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

/* The end that ends: an echo until it is told that it was the last time. */
static void other(int fd, int go, int ends) {
    char c;
    do put(fd, c = get(fd)); while (c != 'l');
    if (get(fd) != 'm') exit(1); /* (the last bytes go one way) */
    NEED(write(go, "r", 1) == 1); /* has read all */
    NEED(read(go, &c, 1) == 1);
    if (ends == 0) kill(getpid(), SIGKILL);
    if (ends == 1) _exit(0);
    exit(0);
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

static int checked(int fd) {
    char x;
    struct pollfd p = {fd, POLLIN, 0};
    int told = -1;
    socklen_t n = sizeof told;
    NEED(poll(&p, 1, 20000) == 1);
    NEED(recv(fd, &x, 1, 0) == 0);
    NEED(!getsockopt(fd, SOL_SOCKET, SO_ERROR, &told, &n) && !told);
    return 0;
}

/* To another place, and back. */
static int over_a_socket(int fd) {
    int s[2];
    char space[CMSG_SPACE(sizeof fd)] = {0};
    struct iovec v = {"x", 1};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    c->cmsg_level = SOL_SOCKET, c->cmsg_type = SCM_RIGHTS, c->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(c), &fd, sizeof fd);
    NEED(!socketpair(AF_UNIX, SOCK_STREAM, 0, s) && sendmsg(s[0], &m, 0) == 1);
    NEED(!close(fd));
    char x;
    v.iov_base = &x;
    NEED(recvmsg(s[1], &m, 0) == 1);
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof fd);
    close(s[0]), close(s[1]);
    return fd;
}

enum { OPTION, RIGHTS, EXEC, STDIO, WAYS };

int main(int argc, char **argv) {
    self = argv[0];
    if (argc == 3) { /* what a round has executed */
        int fd = atoi(argv[1]), go = atoi(argv[2]);
        NEED(write(go, "x", 1) == 1);
        return checked(fd);
    }
    struct sockaddr_in at = {.sin_family = AF_INET};
    socklen_t len = sizeof at;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    NEED(!bind(listener, (void *)&at, sizeof at) && !listen(listener, 5));
    NEED(!getsockname(listener, (void *)&at, &len));
    for (int way = 0; way < WAYS; way++)
        for (int ends = 0; ends < 3; ends++) {
            snprintf(what, sizeof what, "way %d, ends %d", way, ends);
            int go[2];
            NEED(!socketpair(AF_UNIX, SOCK_STREAM, 0, go));
            pid_t p = fork();
            if (!p) {
                close(listener), close(go[1]);
                int fd = socket(AF_INET, SOCK_STREAM, 0);
                NEED(!connect(fd, (void *)&at, len));
                other(fd, go[0], ends);
            }
            close(go[0]);
            int fd = accept(listener, 0, 0), on = 1, status;
            NEED(fd >= 0);
            until_on_lane(fd);
            put(fd, 'l');
            NEED(get(fd) == 'l');
            put(fd, 'm');
            char c;
            NEED(read(go[1], &c, 1) == 1 && c == 'r');
            FILE *f = 0;
            pid_t q = 0;
            switch (way) {
            case OPTION: NEED(!setsockopt(fd, SOL_SOCKET, SO_TIMESTAMP, &on, sizeof on)); break;
            case RIGHTS: fd = over_a_socket(fd); break;
            case STDIO: NEED(f = fdopen(fd, "r")); break;
            case EXEC:
                if (!(q = fork())) {
                    char a[12], b[12];
                    snprintf(a, sizeof a, "%d", fd), snprintf(b, sizeof b, "%d", go[1]);
                    execl(self, self, a, b, (char *)0);
                    _exit(2);
                }
                close(fd);
            }
            if (way == EXEC) {
                /* (The peer's end of the pair is read by the peer alone: the new program lets it go on.) */
                close(go[1]);
                NEED(waitpid(q, &status, 0) == q && !status);
            } else {
                NEED(write(go[1], "x", 1) == 1);
                if (way == STDIO) NEED(fgetc(f) == EOF && feof(f) && !ferror(f) && !fclose(f));
                else NEED(!checked(fd) && !close(fd));
                close(go[1]);
            }
            NEED(waitpid(p, &status, 0) == p && (ends ? !status : WIFSIGNALED(status)));
        }
    printf("result ok\n");
    return 0;
}
