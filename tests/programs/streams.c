/* What the C library does inside with descriptors of connections: streams write, read and close them, and
 * nobody sees it. Every byte arrives, in order, and every end.
 *
 *     streams
 *
 * Prints "result ok" on descriptor 2's copy, for the first three become connections.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>

#include "pairs.h"

static void gets_(int fd, const char *what) {
    char b[200];
    size_t n = strlen(what);
    NEED(recv(fd, b, n, MSG_WAITALL) == (ssize_t)n && !memcmp(b, what, n));
}

static void ends(int fd) {
    char b;
    NEED(recv(fd, &b, 1, 0) == 0 && !close(fd));
}

/* Many small messages both ways: enough to be promoted, if it may be. */
static void talk(int a, int b) {
    for (int k = 0; k < 300; k++) {
        by_lane(a, b), by_lane(b, a);
        if (k % 30 == 29) sleep_us(1000);
    }
}

/* A server that has closed its standard streams: `accept` and `socket` give their numbers. */
static void by_accident(void) {
    int a, b, out = fcntl(1, F_DUPFD, 50), err = fcntl(2, F_DUPFD, 50);
    close(1), close(0);
    dial(&a, &b); /* 0 and 1 */
    NEED(a == 0 && b == 1);
    talk(a, b);
    printf("hello\n"), fflush(stdout);
    gets_(a, "hello\n");
    NEED(write(0, "and back\n", 9) == 9);
    gets_(1, "and back\n");
    NEED(write(1, "a line\nanother\n", 15) == 15);
    char line[40];
    NEED(fgets(line, sizeof line, stdin) && !strcmp(line, "a line\n"));
    NEED(fgets(line, sizeof line, stdin) && !strcmp(line, "another\n"));
    NEED(!fclose(stdin)); /* closes it */
    int other = open("/dev/null", O_RDWR);
    NEED(other == 0 && write(0, "nowhere", 7) == 7);
    ends(1);
    NEED(dup2(out, 1) == 1 && dup2(err, 2) == 2);
}

/* `fdopen` and what follows. */
static void by_fdopen(int how) {
    int a, b;
    char line[40];
    dial(&a, &b);
    warm(a, b);
    FILE *f = fdopen(how == 1 ? dup(a) : a, "r+");
    NEED(f && fprintf(f, "printed\n") > 0 && !fflush(f));
    gets_(b, "printed\n");
    NEED(send(b, "line\n", 5, 0) == 5 && fgets(line, sizeof line, f) && !strcmp(line, "line\n"));
    if (how == 2) {
        NEED(freopen("/dev/null", "r", f)); /* closes it, and takes its number */
        NEED(read(a, line, 1) == 0);
    }
    NEED(!fclose(f));
    if (how == 1) {
        NEED(send(a, "still", 5, 0) == 5);
        gets_(b, "still");
        NEED(!close(a));
    }
    ends(b);
}

int main(void) {
    int a, b;
    alarm(100);
    dial(&a, &b);
    warm(a, b);
    for (int how = 0; how < 3; how++) by_fdopen(how);
    by_accident();
    warm(a, b);
    printf("result ok\n");
    return 0;
}
