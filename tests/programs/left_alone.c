/* One end leaves its lane by exec while the other end, which has put so many bytes on its ring, does nothing; the program
 * that takes over the connection finds all of them on TCP, in order, and what the other end sends when it goes on.
 *
 *     left_alone HOW AMOUNT THEN BY [GATE]
 *
 * HOW the other end does nothing: sleep, spin, stop. THEN: when the bytes are read it sends more and closes (go), only
 * closes (quiet), shuts down and waits for the end (half), or is killed (kill); or it is killed while most of them are
 * unread (early); with a GATE, it goes on before that, when this file is there, of which "ready" is said. BY: the leaving
 * process executes the reader itself (exec), or a child of it does (fork). Prints "ring BYTES" and "result ok".
 */
#define _GNU_SOURCE
#include "pairs.h"
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

enum { MORE = 1000 };

struct shared {
    volatile int go;
    volatile long sent;
    volatile int read;
};

static unsigned char pattern(long i) { return (unsigned char)((i * 2654435761u) >> 13); }

static int echo(int fd, unsigned long *before) {
    char c;
    if (recv(fd, &c, 1, 0) != 1) return -1;
    unsigned long now = info(fd).tcpi_bytes_received;
    int lane = now == *before;
    *before = now;
    return lane * 2 + (c == 'l');
}

static void say(int fd, int lane) { NEED(send(fd, lane ? "l" : "t", 1, 0) == 1); }

static void peer(int b, const char *how, long amount, const char *then, struct shared *s) {
    unsigned long got = info(b).tcpi_bytes_received;
    for (;;) {
        int e = echo(b, &got);
        NEED(e >= 0);
        say(b, e >> 1);
        char last;
        if (recv(b, &last, 1, MSG_PEEK) == 1 && last == 'g') {
            NEED(recv(b, &last, 1, 0) == 1);
            break;
        }
    }
    narrow(b, 50000);
    long sent = 0;
    static unsigned char buf[65536];
    while (sent < amount) {
        long n = amount - sent < (long)sizeof buf ? amount - sent : (long)sizeof buf;
        for (long i = 0; i < n; i++) buf[i] = pattern(sent + i);
        n = send(b, buf, (size_t)n, MSG_DONTWAIT);
        if (n < 0) break;
        sent += n;
    }
    s->sent = sent;
    if (!strcmp(how, "stop")) raise(SIGSTOP);
    else if (!strcmp(how, "spin"))
        while (!s->go) {}
    else
        while (!s->go) usleep(1000);
    if (!strcmp(then, "go")) {
        for (long i = 0; i < MORE; i++) buf[i] = pattern(sent + i);
        NEED(send(b, buf, MORE, 0) == MORE);
    }
    if (!strcmp(then, "half")) NEED(!shutdown(b, SHUT_WR) && recv(b, buf, 1, 0) == 0);
    close(b);
    while (!strcmp(then, "quiet") && !s->read) usleep(1000); /* (the close is all that happens) */
    _exit(0);
}

static void reader(int a, long n, pid_t child, const char *then, const char *gate, struct shared *s) {
    static unsigned char buf[20000];
    long at = 0, end = n + (strcmp(then, "go") ? 0 : MORE);
    int gone_on = 0;
    if (!strcmp(then, "early")) NEED(!kill(child, SIGKILL));
    if (*gate) {
        puts("ready");
        fflush(stdout);
        while (access(gate, F_OK)) usleep(10000);
    }
    for (;;) {
        if (!gone_on && (at == n || *gate)) {
            if (!strcmp(then, "kill")) NEED(!kill(child, SIGKILL));
            s->go = 1;
            kill(child, SIGCONT);
            gone_on = 1;
        }
        long k = recv(a, buf, sizeof buf, 0);
        NEED(k >= 0);
        if (!k) break;
        for (long i = 0; i < k; i++)
            if (buf[i] != pattern(at + i)) {
                fprintf(stderr, "byte %ld is wrong\n", at + i);
                abort();
            }
        at += k;
        if (at < n && n > 100000) usleep(500);
    }
    if (at != end) fprintf(stderr, "%ld of %ld\n", at, end);
    NEED(at == end);
    s->read = 1;
    close(a);
    waitpid(child, 0, 0);
    puts("result ok");
    exit(0);
}

static struct shared *map(int fd) {
    struct shared *s = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    NEED(s != MAP_FAILED);
    return s;
}

int main(int argc, char **argv) {
    if (argc == 8 && !strcmp(argv[1], "read"))
        reader(atoi(argv[2]), atol(argv[3]), atoi(argv[4]), argv[5], argv[6], map(atoi(argv[7])));
    NEED(argc >= 5);
    int mem = memfd_create("left_alone", 0);
    NEED(mem >= 0 && !ftruncate(mem, 4096));
    struct shared *s = map(mem);
    socklen_t len = sizeof address;
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    listener = socket(AF_INET, SOCK_STREAM, 0);
    NEED(!bind(listener, (void *)&address, len) && !listen(listener, 1));
    getsockname(listener, (void *)&address, &len);
    pid_t child = fork();
    if (!child) {
        int b = accept(listener, 0, 0);
        NEED(b >= 0);
        peer(b, argv[1], atol(argv[2]), argv[3], s);
    }
    int a = socket(AF_INET, SOCK_STREAM, 0);
    NEED(!connect(a, (void *)&address, len));
    close(listener);
    unsigned long got = info(a).tcpi_bytes_received;
    int bare = !getenv("LD_PRELOAD");
    for (int k = 0;; k++) {
        NEED(k < 20000);
        say(a, 0);
        int e = echo(a, &got);
        NEED(e >= 0);
        if (e == 3 || (bare && k == 3)) break;
        usleep(1000);
    }
    narrow(a, 50000);
    NEED(send(a, "g", 1, 0) == 1);
    while (!s->sent) usleep(1000);
    usleep(30000);
    printf("ring %ld\n", s->sent);
    fflush(stdout);
    char fd[16], n[16], pid[16], m[16];
    sprintf(fd, "%d", a);
    sprintf(n, "%ld", s->sent);
    sprintf(pid, "%d", child);
    sprintf(m, "%d", mem);
    pid_t by = strcmp(argv[4], "fork") ? 0 : fork();
    if (by) {
        int status;
        close(a);
        NEED(waitpid(by, &status, 0) == by && WIFEXITED(status));
        return WEXITSTATUS(status);
    }
    execl("/proc/self/exe", "left_alone", "read", fd, n, pid, argv[3], argc > 5 ? argv[5] : "", m, (char *)0);
    NEED(0);
}
