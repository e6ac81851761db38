/* What the C library does inside with descriptors of connections: streams write, read and close them, and
 * nobody sees it. Every byte arrives, in order, and every end.
 *
 *     streams
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
    warm(a, b);
    printf("result ok\n");
    return 0;
}
