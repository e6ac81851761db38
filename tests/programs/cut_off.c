/* A peer that reads the first bytes of a send, and closes with the others unread, while that send is still under way: the
 * kernel has had all bytes in its buffer before, so the send is whole, and the next one is told the reset.
 *
 *     cut_off ROUNDS
 *
 * Prints "result ok".
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST = 1 << 20 };
static char buf[MOST];
static int file;

static void need(int ok, const char *what, int round, ssize_t n, size_t of) {
    if (ok) return;
    printf("FAILED %s in round %d: %zd of %zu: %s\n", what, round, n, of, strerror(errno));
    exit(1);
}

/* Sends `n` bytes: few enough for the kernel's buffer, and for `sendfile` for one of its pipes. */
static ssize_t out(int fd, int way, size_t n) {
    struct iovec v[2] = {{buf, n / 3}, {buf + n / 3, n - n / 3}};
    struct msghdr h = {.msg_iov = v, .msg_iovlen = 2};
    off_t at = 0;
    switch (way) {
    case 0: return send(fd, buf, n, 0);
    case 1: return write(fd, buf, n);
    case 2: return writev(fd, v, 2);
    case 3: return sendmsg(fd, &h, 0);
    case 4: return send(fd, buf, n, MSG_DONTWAIT);
    default: return sendfile(fd, file, &at, n);
    }
}

/* Reads a little of each connection as soon as it comes, and closes it. */
static void peer(struct sockaddr_in *a, int rounds) {
    char some[10];
    for (int r = 0; r < rounds; r++) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        struct pollfd p = {fd, POLLIN, 0};
        need(!connect(fd, (void *)a, sizeof *a), "connect", r, 0, 0);
        if (r & 1)
            while (poll(&p, 1, 0) == 0) {
            }
        else
            poll(&p, 1, 20000);
        need(recv(fd, some, sizeof some, 0) == sizeof some, "recv", r, 0, 0);
        close(fd);
    }
    _exit(0);
}

int main(int argc, char **argv) {
    int rounds = argc > 1 ? atoi(argv[1]) : 100, status;
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof a;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    signal(SIGPIPE, SIG_IGN);
    file = memfd_create("file", 0);
    need(file >= 0 && !ftruncate(file, MOST), "file", 0, 0, 0);
    need(!bind(listener, (void *)&a, sizeof a) && !listen(listener, 9), "listen", 0, 0, 0);
    getsockname(listener, (void *)&a, &len);
    pid_t child = fork();
    if (child == 0) {
        close(listener);
        peer(&a, rounds);
    }
    for (int r = 0; r < rounds; r++) {
        static const size_t sizes[] = {65536, 200000, 300000};
        int fd = accept(listener, NULL, NULL), way = r % 6;
        size_t n = way > 3 ? 65536 : sizes[r / 6 % 3];
        struct pollfd p = {fd, 0, 0};
        usleep(r % 4 * 700);
        ssize_t done = out(fd, way, n);
        need(done == (ssize_t)n, "a send", r, done, n);
        need(poll(&p, 1, 20000) == 1 && p.revents & POLLERR, "the error", r, p.revents, 0);
        done = send(fd, buf, 1, 0);
        need(done < 0 && errno == ECONNRESET, "the reset", r, done, 1);
        done = send(fd, buf, 1, 0);
        need(done < 0 && errno == EPIPE, "what follows it", r, done, 1);
        need(recv(fd, buf, 1, 0) == 0, "the end", r, 0, 1);
        close(fd);
    }
    need(waitpid(child, &status, 0) == child && status == 0, "the peer", rounds, status, 0);
    printf("result ok\n");
    return 0;
}
