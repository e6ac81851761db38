// A server's process whose children have threads: while some open and close connections, so that the process
// holds nothing at one moment and something at the next, others change its user, and fork. What comes back on
// each connection is what was sent.
//
//     moving            prints "result ok"
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { THREADS = 3, ROUNDS = 12, CHILDREN = 6, NOBODY = 65534 };

static int port;

static void fail(const char *what) {
    fprintf(stderr, "%d: %s: %s\n", getpid(), what, strerror(errno));
    _exit(1);
}

static int all(int fd, char *buf, size_t n, int out) {
    for (size_t at = 0; at < n;) {
        ssize_t r = out ? send(fd, buf + at, n - at, MSG_NOSIGNAL) : recv(fd, buf + at, n - at, 0);
        if (r < 0 && errno == EINTR) continue;
        if (r <= 0) return -1;
        at += (size_t)r;
    }
    return 0;
}

static void *echo(void *arg) {
    int fd = (int)(long)arg;
    char buf[64];
    while (all(fd, buf, sizeof buf, 0) == 0 && all(fd, buf, sizeof buf, 1) == 0) {}
    close(fd);
    return NULL;
}

static void serve(int listener) {
    for (;;) {
        int fd = accept(listener, NULL, NULL);
        if (fd < 0) {
            if (errno == EINTR) continue;
            return;
        }
        pthread_t t;
        if (pthread_create(&t, NULL, echo, (void *)(long)fd)) close(fd);
        else pthread_detach(t);
    }
}

static int dial(void) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((unsigned short)port)};
    inet_pton(AF_INET, "127.0.0.1", &a.sin_addr);
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    if (fd < 0) fail("socket");
    while (connect(fd, (struct sockaddr *)&a, sizeof a)) {
        if (errno == EISCONN) break;
        if (errno != EINTR && errno != EALREADY && errno != EINPROGRESS) fail("connect");
        struct pollfd p = {fd, POLLOUT, 0};
        poll(&p, 1, 1000);
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return fd;
}

static void ping(int fd, int turns) {
    for (int k = 0; k < turns; k++) {
        char out[64], in[64];
        for (size_t i = 0; i < sizeof out; i++) out[i] = (char)(k + fd * 7 + (int)i);
        if (all(fd, memcpy(in, out, sizeof in), sizeof in, 1) || all(fd, in, sizeof in, 0)) fail("echo");
        if (memcmp(in, out, sizeof in)) {
            errno = 0;
            fail("other bytes");
        }
    }
}

static void *client(void *arg) {
    unsigned seed = (unsigned)(long)arg;
    for (int k = 0; k < ROUNDS; k++) {
        int fd = dial();
        ping(fd, 1 + (int)(rand_r(&seed) % 60));
        if (rand_r(&seed) % 4 == 0) {
            int copy = dup(fd);
            close(fd);
            fd = copy;
            ping(fd, 3);
        }
        close(fd);
        if (rand_r(&seed) % 3 == 0) usleep(200);
    }
    return NULL;
}

// Back and forth, by name (all threads) and by number (this one).
static void change_user(void) {
    int e = errno;
    if (seteuid(NOBODY) || geteuid() != NOBODY || seteuid(0)) fail("seteuid");
    if (syscall(SYS_setresgid, -1, NOBODY, -1) || syscall(SYS_setresgid, -1, 0, -1)) fail("setresgid");
    if (setuid(0)) fail("setuid");
    errno = e;
}

static void *changer(void *arg) {
    for (int k = 0; k < ROUNDS; k++) {
        change_user();
        if (k % 8 == 0) {
            pid_t p = fork();
            if (p == 0) {
                int fd = dial();
                ping(fd, 5);
                if (setgid(NOBODY) || setuid(NOBODY)) fail("drop");
                ping(fd, 20);
                close(fd);
                _exit(0);
            }
            int status;
            while (waitpid(p, &status, 0) < 0 && errno == EINTR) {}
            if (status) fail("grandchild");
        }
        usleep(500);
    }
    return arg;
}

static void child(int inherited, int listener, int n) {
    if (n & 2) change_user();
    ping(inherited, 10);
    close(listener);
    if (n & 4) {
        ping(inherited, 10);
        change_user();
    }
    pthread_t t[THREADS + 1];
    for (long k = 0; k < THREADS; k++) pthread_create(&t[k], NULL, client, (void *)(k + n * 10));
    pthread_create(&t[THREADS], NULL, changer, NULL);
    ping(inherited, 50);
    close(inherited);
    for (int k = 0; k <= THREADS; k++) pthread_join(t[k], NULL);
    change_user();
    int fd = dial();
    ping(fd, 100);
    close(fd);
    _exit(0);
}

int main(void) {
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in a = {.sin_family = AF_INET};
    socklen_t len = sizeof a;
    inet_pton(AF_INET, "127.0.0.1", &a.sin_addr);
    if (bind(listener, (struct sockaddr *)&a, sizeof a) || listen(listener, 64)) fail("listen");
    getsockname(listener, (struct sockaddr *)&a, &len);
    port = ntohs(a.sin_port);
    pid_t server = fork();
    if (server == 0) serve(listener);
    int mine = dial();
    ping(mine, 200);
    for (int n = 0; n < CHILDREN; n++) {
        int given = dial();
        ping(given, 200);
        pid_t p = fork();
        if (p == 0) {
            close(mine);
            child(given, listener, n);
        }
        close(given);
        ping(mine, 50);
        int status;
        if (waitpid(p, &status, 0) != p || status) {
            fprintf(stderr, "child %d: status %x\n", n, status);
            kill(server, SIGKILL);
            return 1;
        }
        ping(mine, 50);
    }
    kill(server, SIGKILL);
    puts("result ok");
    return 0;
}
