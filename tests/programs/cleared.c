// A forked child closes the connection that it has inherited while a call of its own still sleeps on it, in the
// kernel. What it makes next has the same place in its tables, and must not be taken for the one before when
// that call comes back with bytes.
//
//     cleared thread     a thread sleeps, another closes; the next connection is made at once
//     cleared handler    a signal handler closes, in the middle of the call, which it ends, and makes the next
//                        one; the child has a connection of its own besides
//
// Prints "result ok".
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PINGS = 200, PAUSES = 150, SERVERS = 2 };

static struct sockaddr_in address = {.sin_family = AF_INET};
static int given, own = -1, gone[2], tell[2];

static void fail(const char *what) {
    fprintf(stderr, "%d: %s: %s\n", getpid(), what, strerror(errno));
    _exit(1);
}

static void all(int fd, char *buf, size_t n, int out) {
    for (size_t at = 0; at < n;) {
        ssize_t r = out ? send(fd, buf + at, n - at, MSG_NOSIGNAL) : recv(fd, buf + at, n - at, 0);
        if (r <= 0) fail(out ? "send" : "recv");
        at += (size_t)r;
    }
}

static int dial(void) {
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address)) fail("connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return fd;
}

static void ping(int fd, int turns) {
    for (int k = 0; k < turns; k++) {
        char out[64], in[64];
        memset(out, k, sizeof out);
        all(fd, memcpy(in, out, sizeof in), sizeof in, 1);
        all(fd, in, sizeof in, 0);
        if (memcmp(in, out, sizeof in)) fail("other bytes");
    }
}

// Long enough for a daemon to be found, and lanes to be made.
static void busy(int fd) {
    for (int k = 0; k < PAUSES; k++) {
        ping(fd, PINGS);
        usleep(10000);
    }
}

static void echo(int fd) {
    char buf[64];
    for (;;) {
        ssize_t r = recv(fd, buf, sizeof buf, MSG_WAITALL);
        if (r <= 0) _exit(r ? 1 : 0);
        all(fd, buf, (size_t)r, 1);
    }
}

static void word(int from, char c) {
    char got = 0;
    if (read(from, &got, 1) != 1 || got != c) fail("word");
}

static _Atomic pid_t sleeping;

static void *sleeper(void *arg) {
    sleeping = (pid_t)syscall(SYS_gettid);
    char late[8];
    ssize_t r = recv(given, late, sizeof late, 0);
    if (arg ? r >= 0 || errno != EINTR : r != 4 || memcmp(late, "late", 4)) fail("the late word");
    return NULL;
}

static int sleeps(pid_t pid, pid_t tid) {
    char path[64], line[64] = "";
    snprintf(path, sizeof path, "/proc/%d/task/%d/syscall", pid, tid);
    FILE *f = fopen(path, "r");
    if (f) {
        if (!fgets(line, sizeof line, f)) line[0] = 0;
        fclose(f);
    }
    return atoi(line) == SYS_recvfrom;
}

// Instead of the connection that the child has inherited, one of its own.
static void replace(void) {
    close(given);
    own = dial();
    if (write(tell[1], ".", 1) != 1) fail("tell");
}

static void handler(int sig) {
    int e = errno;
    replace();
    errno = e;
    (void)sig;
}

static void child(int by_handler) {
    int more = by_handler ? dial() : -1;
    if (more >= 0) ping(more, PINGS);
    word(gone[0], '.');
    if (by_handler) {
        struct sigaction a = {.sa_handler = handler};
        sigaction(SIGUSR1, &a, NULL);
        if (write(tell[1], "!", 1) != 1) fail("tell");
        sleeper(&more);
    } else {
        pthread_t t;
        pthread_create(&t, NULL, sleeper, NULL);
        while (!sleeping || !sleeps(getpid(), sleeping)) usleep(1000);
        replace();
        pthread_join(t, NULL);
    }
    busy(own);
    if (more >= 0) ping(more, PINGS), close(more);
    close(own);
    _exit(0);
}

int main(int argc, char **argv) {
    int by_handler = argc > 1 && !strcmp(argv[1], "handler"), bad = 0;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    socklen_t len = sizeof address;
    inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 8)) fail("listen");
    getsockname(listener, (struct sockaddr *)&address, &len);
    if (pipe(tell) || pipe(gone)) fail("pipe");
    given = dial();
    int far = accept(listener, NULL, NULL);
    pid_t pids[1 + SERVERS];
    for (int k = 1; k <= (by_handler ? 2 : 1); k++) {
        if ((pids[k] = fork()) == 0) {
            close(given), close(far);
            echo(accept(listener, NULL, NULL));
        }
    }
    if ((pids[0] = fork()) == 0) {
        close(listener), close(far);
        child(by_handler);
    }
    close(given); // the child is the only one that has it now
    if (write(gone[1], ".", 1) != 1) fail("gone");
    if (by_handler) {
        word(tell[0], '!');
        while (!sleeps(pids[0], pids[0])) usleep(1000);
        usleep(20000); // (or else the handler runs before the call, which is as good, but tests less)
        kill(pids[0], SIGUSR1);
    }
    word(tell[0], '.');
    all(far, (char[]){"late"}, 4, 1);
    for (int k = 0; k <= (by_handler ? 2 : 1); k++) {
        int status;
        if (waitpid(pids[k], &status, 0) != pids[k] || status) {
            fprintf(stderr, "process %d: status %x\n", k, status);
            bad = 1;
        }
    }
    if (!bad) puts("result ok");
    return bad;
}
