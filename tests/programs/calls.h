/* For calls.c and peeks.c: the two ends, what is under way between them, and what is written down. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "raw.h"

enum { TCP_ESTABLISHED = 1, TCP_FIN_WAIT1 = 4, TCP_FIN_WAIT2, TCP_CLOSE = 7, TCP_CLOSE_WAIT, TCP_LAST_ACK, TCP_CLOSING = 11 };
#define STEPS 60
#define MOST 30000  /* bytes under way: less than TCP's buffers hold */
#define PAGE 1500   /* under way, with which a ring of one page still has room */
#define AREA 65536
#define VECS 20

static struct end {
    int fd, closed, shut, rdshut;
    long unread; /* bytes that the other end has sent */
    int nonblock, hasty, reset_due, pieces;
} ends[2];
static uint64_t state, place[2]; /* of the streams */
static FILE *out;
static int warm /* it was on its lane at first */, wide /* more than a page was under way */;
static int step, listener, set, file, pipes[2], foreign /* bytes of another stream were sent */, tame, lanes, unsettled;
static volatile sig_atomic_t sigpipes;
static char *area; /* good; what follows it is not */
static char text[AREA];
static long r;
static int e;

static void need(int ok, const char *what) {
    if (ok) return;
    fprintf(stderr, "FAILED %s: %s (step %d)\n", what, strerror(errno), step);
    abort();
}

static uint64_t any(uint64_t n) {
    uint64_t z = (state += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return (z ^ (z >> 31)) % n;
}

#define ONE_OF(...) ((const long[]){__VA_ARGS__}[any(sizeof((const long[]){__VA_ARGS__}) / sizeof(long))])

/* From `a` to `b`: has all that was sent arrived? (The end counts as a byte received.) */
static int arrived(struct end *a, struct end *b) {
    if (b->closed) return 1;
    struct tcp_info ib = info(b->fd);
    if (ib.tcpi_state == TCP_CLOSE) return 1;
    int ended = ib.tcpi_state == TCP_CLOSE_WAIT || ib.tcpi_state == TCP_LAST_ACK || ib.tcpi_state == TCP_CLOSING;
    if (a->closed) return ended && !b->reset_due;
    struct tcp_info ia = info(a->fd);
    if (ia.tcpi_notsent_bytes) {
        int one = 1;
        raw(SYS_setsockopt, a->fd, IPPROTO_TCP, TCP_NODELAY, (long)&one, sizeof one); /* pushes */
        return 0;
    }
    int ending = ia.tcpi_state != TCP_ESTABLISHED && ia.tcpi_state != TCP_CLOSE_WAIT;
    return (ended || !ending) && ib.tcpi_bytes_received >= ia.tcpi_bytes_sent - ia.tcpi_bytes_retrans;
}

static void pause_us(long us) {
    struct timespec a, b;
    clock_gettime(CLOCK_MONOTONIC, &a);
    do clock_gettime(CLOCK_MONOTONIC, &b);
    while ((b.tv_sec - a.tv_sec) * 1000000000 + b.tv_nsec - a.tv_nsec < us * 1000);
}

/* Until all has arrived, and longer than the 20 us for which who finds a ring empty does not ask TCP again. */
static void settle(void) {
    for (int k = 0; k < 2000; k++) {
        if (arrived(&ends[0], &ends[1]) && arrived(&ends[1], &ends[0])) return pause_us(25);
        if (k > 20) raw(SYS_nanosleep, (long)&(struct timespec){0, 100000}, 0, 0, 0, 0);
    }
    unsettled++;
}

/* ---- what is written down ---- */

static void say(const char *how, ...) {
    va_list l;
    va_start(l, how);
    vfprintf(out, how, l);
    va_end(l);
}

static char more[400]; /* for the end of the line */

static void note(const char *how, ...) {
    va_list l;
    va_start(l, how);
    vsnprintf(more + strlen(more), sizeof more - strlen(more), how, l);
    va_end(l);
}

static void told(int k, const char *how, ...) {
    va_list l;
    say("%d %c ", step, 'a' + k);
    va_start(l, how);
    vfprintf(out, how, l);
    va_end(l);
    say(" = %ld", r);
    if (r < 0) say(" %s", strerrorname_np(e));
    if (sigpipes) say(" SIGPIPE*%d", (int)sigpipes);
    say("%s\n", more);
    sigpipes = more[0] = 0;
}

#define DO(x) (errno = 0, r = (x), e = errno)
static int by_number;
#define BY(name, number, ...) DO(by_number ? syscall(number, __VA_ARGS__) : name(__VA_ARGS__))

static uint32_t hash(const char *p, long n) {
    uint32_t h = 2166136261u;
    for (long k = 0; k < n; k++) h = (h ^ (unsigned char)p[k]) * 16777619u;
    return h;
}

/* The stream that end `k` sends, from where it is. */
static void fill(int k, char *p, long n) {
    for (long j = 0; j < n; j++) {
        uint64_t z = (place[k] + j) * 0x9e3779b97f4a7c15;
        p[j] = 33 + (z >> 40) % 90;
    }
}

static void sent(int k, long n) {
    if (n < 0) return;
    place[k] += n;
    ends[!k].unread += n;
    wide |= ends[!k].unread > PAGE;
    ends[!k].pieces++;
    if (ends[!k].closed) ends[k].reset_due |= n > 0;
}

static void taken(int k, long n) {
    ends[k].unread -= n > ends[k].unread ? ends[k].unread : n;
    if (!ends[k].unread) ends[k].pieces = 0;
}

/* `n` bytes at `p`, in pieces, some of them of no length. */
static int pieces(struct iovec *v, char *p, long n) {
    int count = any(VECS + 1);
    if (!count && n) count = 1;
    for (int k = 0; k < count; k++) {
        long part = k == count - 1 ? n : any(3) ? (long)any(n + 1) : 0;
        v[k] = (struct iovec){part || any(2) ? p : NULL, part};
        p += part;
        n -= part;
    }
    return count;
}

/* Unread bytes cannot always get back to TCP: not those of a connection that has ended, nor those from before a lane,
 * behind which the frame of a second switch lies (limit 9). */
static int may_leave(int k) {
    if (ends[k].unread && (tame || !warm || wide)) return 0;
    return (!ends[0].unread && !ends[1].unread) || info(ends[k].fd).tcpi_state == TCP_ESTABLISHED;
}

/* Are these the bytes that are to come? */
static int is_next(int k, const char *p, long n) {
    char b[n];
    uint64_t at = place[!k];
    place[!k] -= ends[k].unread;
    fill(!k, b, n);
    place[!k] = at;
    return !memcmp(b, p, n);
}

/* Behind a switch there may be more than one receive finds: the rest of what was asked for. */
static void behind(int k, long n, long flags) {
    long all = n < ends[k].unread ? n : ends[k].unread;
    if (r <= 0 || flags & (MSG_PEEK | MSG_OOB | MSG_ERRQUEUE)) return;
    while (r < all) {
        long got = recv(ends[k].fd, area + r, all - r, MSG_DONTWAIT | (flags & MSG_TRUNC));
        if (got <= 0) break;
        r += got;
    }
}

static void got(int k, long flags) {
    if (r > 0 && flags & MSG_PEEK && !(flags & MSG_OOB)) {
        if (!(foreign || flags & MSG_TRUNC || is_next(k, area, r))) note(" not the stream");
        if (tame) r = 1; /* how much a peek finds */
    } else if (r > 0) note(" %08x", flags & MSG_TRUNC ? 0 : hash(area, r));
    if (r > 0 && !(flags & (MSG_PEEK | MSG_OOB | MSG_ERRQUEUE))) taken(k, r);
}

static long amount(int k) {
    long n = ONE_OF(0, 1, 2, 10, 100, 700, 1400, 3000, 9000), under_way = ends[!k].unread;
    if (under_way + n > MOST || ends[!k].pieces > 40) return 0;
    return n;
}

static long send_flags(int k) {
    if (any(40) == 0 && may_leave(k) && info(ends[k].fd).tcpi_state != TCP_CLOSE)
        return ONE_OF(MSG_OOB, MSG_FASTOPEN, 0x1000000, MSG_PROXY);
    return ONE_OF(0, 0, 0, MSG_NOSIGNAL, MSG_NOSIGNAL, MSG_DONTWAIT, MSG_MORE, MSG_EOR, MSG_CONFIRM, MSG_ZEROCOPY,
                  MSG_MORE | MSG_DONTWAIT | MSG_NOSIGNAL, MSG_DONTROUTE, MSG_TRUNC | MSG_PEEK, MSG_WAITALL);
}

static long receive_flags(int k) {
    if (any(40) == 0 && may_leave(k))
        return ONE_OF(MSG_OOB, 0x1000000, MSG_ERRQUEUE, MSG_OOB | MSG_PEEK);
    return ONE_OF(0, 0, 0, MSG_PEEK, MSG_PEEK, MSG_WAITALL, MSG_DONTWAIT, MSG_DONTWAIT, MSG_TRUNC, MSG_PEEK | MSG_TRUNC,
                  MSG_PEEK | MSG_DONTWAIT, MSG_WAITALL | MSG_DONTWAIT, MSG_NOSIGNAL, MSG_CMSG_CLOEXEC,
                  MSG_PEEK | MSG_WAITALL | MSG_DONTWAIT, MSG_WAITALL | MSG_PEEK, MSG_CONFIRM, MSG_EOR | MSG_MORE,
                  MSG_DONTROUTE | MSG_PEEK);
}

/* ---- a connection ---- */

static void set_up(void) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    area = mmap(NULL, 3 * AREA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    need(area != MAP_FAILED && !mprotect(area + AREA, 2 * AREA, PROT_NONE), "memory");
    listener = socket(AF_INET, SOCK_STREAM, 0);
    need(!bind(listener, (void *)&a, sizeof a) && !listen(listener, 8), "listen");
}

static void join_ends(void) {
    struct sockaddr_in a;
    socklen_t n = sizeof a;
    int one = 1;
    memset(ends, 0, sizeof ends);
    memset(place, 0, sizeof place);
    ends[0].fd = socket(AF_INET, SOCK_STREAM, 0);
    getsockname(listener, (void *)&a, &n);
    need(!connect(ends[0].fd, (void *)&a, sizeof a), "connect");
    ends[1].fd = accept(listener, NULL, NULL);
    need(ends[1].fd >= 0, "accept");
    for (int k = 0; k < 2; k++) setsockopt(ends[k].fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

/* Messages until they travel on a lane. (TCP_INFO tells of TCP only.) */
static void warm_up(void) {
    char b[64] = {0};
    int shim = !!getenv("UNDERPASS_DIR");
    for (int k = 0; k < (shim ? 300 : 2); k++) {
        uint64_t before = info(ends[0].fd).tcpi_bytes_received + info(ends[1].fd).tcpi_bytes_received;
        for (int j = 0; j < 2; j++) {
            need(send(ends[j].fd, b, sizeof b, 0) == sizeof b, "send");
            need(recv(ends[!j].fd, b, sizeof b, MSG_WAITALL) == sizeof b, "recv");
        }
        if (before == info(ends[0].fd).tcpi_bytes_received + info(ends[1].fd).tcpi_bytes_received) {
            lanes++;
            return;
        }
        usleep(shim ? 300 : 0);
    }
}
