/* A child has inherited a connection; its parent has closed its own copy of it and so given the lane back, and the place
 * of that lane belongs to other connections by now. What the child does with its connection is not seen by those, and
 * what those do is not seen by it.
 *
 *     replaced            prints "result ok"
 */
#define _GNU_SOURCE
#include <poll.h>
#include <sys/wait.h>

#include "pairs.h"

enum { OTHERS = 3, UNREAD = 100, AGAIN = 1500 /* ms: longer than an end that TCP does not report takes to be reported */ };

static char bytes[UNREAD];

static void execs(int b) {
    execl("/nonexistent", "nonexistent", (char *)0);
    char c;
    NEED(recv(b, &c, 1, 0) == 0);
}

static void closes(int b) {
    NEED(!close(b));
}

static void shuts(int b) {
    NEED(!shutdown(b, SHUT_RDWR));
}

/* The same after what the parent sends last has come, and is unread. */
static void resets(int b) {
    char c;
    NEED(recv(b, &c, 1, MSG_PEEK) == 1);
    closes(b);
}

/* The child, which does that as soon as it is told to. */
static pid_t inheritor(void (*what)(int), int a, int b, int *tell) {
    int go[2];
    char c;
    NEED(!pipe(go));
    pid_t child = fork();
    NEED(child >= 0);
    if (!child) {
        NEED(!close(a) && !close(go[1]));
        NEED(read(go[0], &c, 1) == 1);
        what(b);
        _exit(0);
    }
    close(go[0]);
    *tell = go[1];
    return child;
}

/* Other connections, on lanes, of which both ends have something to read. */
static void others(int *a, int *b) {
    for (int k = 0; k < OTHERS; k++) {
        dial(&a[k], &b[k]);
        warm(a[k], b[k]);
        NEED(send(a[k], bytes, UNREAD, 0) == UNREAD && send(b[k], bytes, UNREAD, 0) == UNREAD);
    }
}

/* They are as they were, and go on. */
static void go_on(int *a, int *b) {
    struct pollfd p[2 * OTHERS];
    for (int k = 0; k < OTHERS; k++) {
        NEED(recv(a[k], bytes, UNREAD, MSG_WAITALL) == UNREAD && recv(b[k], bytes, UNREAD, MSG_WAITALL) == UNREAD);
        p[2 * k] = (struct pollfd){.fd = a[k], .events = POLLIN | POLLRDHUP};
        p[2 * k + 1] = (struct pollfd){.fd = b[k], .events = POLLIN | POLLRDHUP};
    }
    NEED(poll(p, 2 * OTHERS, AGAIN) == 0);
    for (int k = 0; k < OTHERS; k++) {
        by_lane(a[k], b[k]);
        by_lane(b[k], a[k]);
        close(a[k]);
        close(b[k]);
    }
}

static void try_one(void (*what)(int)) {
    int a, b, tell, status, c[OTHERS], d[OTHERS];
    char x;
    dial(&a, &b);
    warm(a, b);
    pid_t child = inheritor(what, a, b, &tell);
    NEED(!close(b));
    for (int k = 0; k < 20; k++) { /* (the daemon tells `a` that its lane is gone) */
        NEED(recv(a, &x, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN);
        sleep_us(5000);
    }
    others(c, d);
    if (what == resets) NEED(send(a, "x", 1, 0) == 1);
    else NEED(!shutdown(a, SHUT_WR));
    NEED(write(tell, "g", 1) == 1);
    NEED(waitpid(child, &status, 0) == child && status == 0);
    if (what == resets) NEED(recv(a, &x, 1, 0) < 0 && errno == ECONNRESET);
    else NEED(recv(a, &x, 1, 0) == 0);
    close(a);
    close(tell);
    go_on(c, d);
}

int main(void) {
    try_one(execs);
    try_one(closes);
    try_one(shuts);
    try_one(resets);
    puts("result ok");
}
