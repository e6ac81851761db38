/* Threads that never come back from a call in which the kernel has moved a part of the bytes (they are cancelled,
 * or a handler leaves by siglongjmp), so that nobody can say how many: the stream goes on where the kernel is, and
 * the connection goes up all the same.
 *
 *     uncounted
 *
 * Both ends are in this process. Prints "result ok".
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/uio.h>
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
static struct sockaddr_in at;
static socklen_t len = sizeof at;
static int listener, file;
static int a, b; /* two ends of one connection */
static char buf[1 << 20], in[1 << 20];

static void nap(int ms) {
    struct timespec t = {ms / 1000, ms % 1000 * 1000000L};
    while (nanosleep(&t, &t)) {}
}

/* The calls that are left: each ends only by that, with a part of its bytes moved. */
static void do_send(int fd) {
    for (;;) send(fd, buf, 60001, 0);
}
static void do_large(int fd) {
    for (;;) send(fd, buf, sizeof buf, 0);
}
static void do_writev(int fd) {
    struct iovec v[2] = {{buf, 20003}, {buf, 30011}};
    for (;;) (void)!writev(fd, v, 2);
}
static void do_sendfile(int fd) {
    for (;;) {
        off_t from = 0;
        sendfile(fd, file, &from, 50021);
    }
}
static void do_recv(int fd) { recv(fd, in, 100, MSG_WAITALL); }
static void do_recvmsg(int fd) {
    struct iovec v[2] = {{in, 50}, {in, 50}};
    struct msghdr m = {.msg_iov = v, .msg_iovlen = 2};
    recvmsg(fd, &m, MSG_WAITALL);
}

static void (*calls[])(int) = {do_send, do_large, do_writev, do_sendfile, do_recv, do_recvmsg};
#define CALLS (int)(sizeof calls / sizeof *calls)
#define SENDS 4 /* the first ones */

static void *run(void *call) {
    (*(void (**)(int))call)(a);
    return 0;
}

/* Waits until so many bytes lie unread at `a`. */
static void until_unread(int bytes) {
    for (int n = -1; n != bytes; nap(1)) NEED(!ioctl(a, FIONREAD, &n));
}

static sigjmp_buf out;

static void away(int sig) {
    (void)sig;
    siglongjmp(out, 1);
}

/* Somebody else is inside a send meanwhile. */
static void *beside(void *none) {
    NEED(send(a, "beside", 6, 0) == 6);
    return none;
}

/* Ends a call that somebody else makes: a receive when it has what there is, a send when the buffers are full. */
static struct end {
    pthread_t who;
    int call, jumps, ms;
} ended;

static void *end(void *arg) {
    struct end *e = arg;
    if (e->call >= SENDS) until_unread(0);
    else nap(e->ms);
    NEED(!(e->jumps ? pthread_kill(e->who, SIGALRM) : pthread_cancel(e->who)));
    return 0;
}

/* Makes a call and leaves it. */
static void leave(int call, int jumps, int ms) {
    static pthread_t t;
    void *r;
    ended = (struct end){pthread_self(), call, jumps, ms};
    if (!jumps) {
        NEED(!pthread_create(&ended.who, 0, run, &calls[call]));
        end(&ended);
        NEED(!pthread_join(ended.who, &r) && r == PTHREAD_CANCELED);
    } else if (!sigsetjmp(out, 1)) {
        NEED(!pthread_create(&t, 0, end, &ended));
        calls[call](a);
        NEED(!"came back");
    } else {
        NEED(!pthread_join(t, 0));
    }
}

/* When nobody else is inside any more. */
static void *trailer(void *other) {
    if (other) NEED(!pthread_join(*(pthread_t *)other, 0));
    NEED(send(a, "END!", 4, 0) == 4);
    return 0;
}

/* All that `a` has sent, up to a mark behind it: x, and what was sent beside, by a thread that ends with this. */
static void drain(pthread_t *other) {
    pthread_t t;
    char end[5] = "....";
    NEED(!pthread_create(&t, 0, trailer, other));
    while (strcmp(end, "END!")) {
        ssize_t n = recv(b, in, sizeof in, 0);
        NEED(n > 0);
        for (ssize_t k = 0; k < n; k++) {
            NEED(in[k] && strchr("xbesidEND!", in[k]));
            memmove(end, end + 1, 3), end[3] = in[k];
        }
    }
    NEED(!pthread_join(t, 0));
}

/* Both directions. */
static void exchange(int rounds) {
    for (int k = 0; k < rounds; k++) {
        char x[64], y[64];
        memset(x, k, sizeof x);
        NEED(send(a, x, sizeof x, 0) == sizeof x && recv(b, y, sizeof y, MSG_WAITALL) == sizeof y);
        NEED(!memcmp(x, y, sizeof x));
        NEED(send(b, x, sizeof x, 0) == sizeof x && recv(a, y, sizeof y, MSG_WAITALL) == sizeof y);
        NEED(!memcmp(x, y, sizeof x));
    }
}

static void until_on_lane(void) {
    exchange(20);
    for (int tries = 0; under_shim(); tries++) {
        struct moved before = moved(a);
        exchange(3);
        if (still(a, before)) return;
        NEED(tries < 4000);
        nap(5);
    }
}

static void test(int call, int jumps, int lane, int company) {
    snprintf(what, sizeof what, "call %d, %s, %s%s", call, jumps ? "jump" : "cancel",
             lane ? "after a lane" : "before a lane", company ? ", others inside" : "");
    a = socket(AF_INET, SOCK_STREAM, 0);
    NEED(!connect(a, (void *)&at, sizeof at));
    /* A non-blocking end that nobody watches gets no lane. */
    b = accept4(listener, 0, 0, lane ? 0 : SOCK_NONBLOCK);
    NEED(b >= 0);
    if (lane) until_on_lane();
    pthread_t t;
    if (call >= SENDS) {
        NEED(send(b, buf, 50, 0) == 50);
        until_unread(50);
    }
    leave(call, jumps, lane ? 120 : 60);
    if (company) { /* (The buffer is full: it waits.) */
        NEED(!pthread_create(&t, 0, beside, 0));
        nap(30);
        leave(call, jumps, 30);
    }
    NEED(!fcntl(b, F_SETFL, 0));
    if (call < SENDS) drain(company ? &t : 0);
    until_on_lane();
    exchange(2000);
    close(a), close(b);
}

int main(void) {
    memset(buf, 'x', sizeof buf);
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    listener = socket(AF_INET, SOCK_STREAM, 0);
    NEED(!bind(listener, (void *)&at, sizeof at) && !listen(listener, 10));
    NEED(!getsockname(listener, (void *)&at, &len));
    NEED((file = memfd_create("file", 0)) >= 0 && write(file, buf, sizeof buf) == sizeof buf);
    signal(SIGALRM, away);
    for (int call = 0; call < CALLS; call++)
        for (int jumps = 0; jumps < 2; jumps++)
            for (int lane = 0; lane < 2; lane++)
                if (jumps || calls[call] != do_sendfile) test(call, jumps, lane, 0); /* (no cancellation point) */
    for (int jumps = 0; jumps < 2; jumps++) test(0, jumps, 0, 1);
    printf("result ok\n");
    return 0;
}
