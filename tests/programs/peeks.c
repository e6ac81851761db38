/* What there is to read, at known switches: bytes from before the lane, on the ring, and on TCP behind the frame of a way
 * down, any of which may be missing or have been read in part; then nothing more, an end, or the other end's close. How
 * much FIONREAD, TCP_INQ, peeks and receives find is what was sent, wherever it lies.
 *
 *     peeks FIRST COUNT      rounds, each with a connection of its own and the random numbers of its seed
 */
#include "calls.h"

static uint64_t seed;
static int asks /* TCP_INQ */, up, down; /* rounds that went up with bytes unread, and down again */

#define NEED(ok, ...) \
    do { \
        if (!(ok)) { \
            fprintf(stderr, "FAILED seed %lu line %d: %s; ", seed, __LINE__, #ok); \
            fprintf(stderr, __VA_ARGS__); \
            fprintf(stderr, " (%ld unread, errno %d)\n", ends[0].unread, errno); \
            exit(1); \
        } \
    } while (0)

static void put(long n) {
    fill(1, area, n);
    NEED(send(ends[1].fd, area, n, MSG_NOSIGNAL) == n, "send of %ld", n);
    sent(1, n);
}

static uint64_t on_tcp(void) {
    struct tcp_info i = info(ends[1].fd);
    return i.tcpi_bytes_sent - i.tcpi_bytes_retrans + i.tcpi_notsent_bytes;
}

/* Sends at end 1, while end 0 only looks, until bytes go by the ring. */
static void up_unread(long n) {
    int shim = !!getenv("UNDERPASS_DIR");
    put(n);
    for (int turn = 0;; turn++) {
        uint64_t before = on_tcp();
        char b;
        put(1);
        if (shim ? on_tcp() == before : turn == 10) break;
        NEED(turn < 5000, "there is no lane");
        NEED(recv(ends[0].fd, &b, 1, MSG_PEEK) == 1, "peek");
        if (shim) usleep(300);
    }
}

static void take(long n) {
    memset(area, 0, AREA);
    long got = n ? recv(ends[0].fd, area, n, ONE_OF(0, 0, MSG_DONTWAIT, MSG_WAITALL | MSG_DONTWAIT)) : 0;
    NEED(got == n, "received %ld, not %ld", got, n);
    NEED(is_next(0, area, n), "not the stream");
    taken(0, n);
}

/* Buffers for `n` bytes, up to as many as the kernel takes. */
static int buffers(struct iovec *v, long n) {
    int count = ONE_OF(1, 2, 3, 16, 17, 200, 1000);
    for (int k = 0; k < count; k++) {
        long part = k == count - 1 ? n : n ? (long)any(2 * n / count + 2) % (n + 1) : 0;
        v[k] = (struct iovec){area + (k ? (char *)v[k - 1].iov_base - area + v[k - 1].iov_len : 0), part};
        n -= part;
    }
    return count;
}

static void count(int ended) {
    int n = -1;
    NEED(!ioctl(ends[0].fd, FIONREAD, &n) && n == ends[0].unread, "FIONREAD %d", n);
    struct pollfd p = {ends[0].fd, POLLIN, 0};
    NEED(poll(&p, 1, 0) == (ends[0].unread > 0 || ended), "poll %x", p.revents);
}

static void peek(void) {
    static struct iovec v[1024];
    long unread = ends[0].unread, n = any(2) ? (long)any(unread + 100) : ONE_OF(1, unread, unread + 1, AREA);
    if (!n || n > AREA) n = 1;
    long want = n < unread ? n : unread, flags = MSG_PEEK | ONE_OF(0, 0, MSG_DONTWAIT, MSG_WAITALL, MSG_WAITALL | MSG_DONTWAIT, MSG_TRUNC);
    if (flags & MSG_WAITALL && !(flags & MSG_DONTWAIT) && n > unread) flags |= MSG_DONTWAIT;
    memset(area, 0, AREA);
    struct msghdr m = {.msg_iov = v, .msg_iovlen = buffers(v, n)};
    long got = any(3) ? recvmsg(ends[0].fd, &m, flags) : recv(ends[0].fd, area, n, flags);
    NEED(got == want, "peeked %ld, not %ld of %ld, flags %lx, in %zu", got, want, n, flags, m.msg_iovlen);
    NEED(flags & MSG_TRUNC || is_next(0, area, got), "not the stream");
    for (long k = flags & MSG_TRUNC ? 0 : got; k < AREA; k++) NEED(!area[k], "written behind, at %ld of %ld", k, got);
}

/* TCP_INQ: what is left after a receive, and one for the end. */
static void inq(int ended) {
    union { char b[64]; struct cmsghdr c; } control;
    struct iovec v = {area, 1};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    NEED(recvmsg(ends[0].fd, &m, 0) == 1, "recvmsg");
    taken(0, 1);
    int left = -1;
    memcpy(&left, CMSG_DATA(&control.c), sizeof left);
    NEED(m.msg_controllen && control.c.cmsg_type == TCP_CM_INQ && left == ends[0].unread + ended, "TCP_INQ %d", left);
}

static void look(int ended) {
    for (int k = any(8); k > 0 && ends[0].unread; k--) {
        switch (any(5)) {
        case 0: count(ended); break;
        case 1: if (asks) inq(ended); break;
        case 2: take(any(2) ? (long)any(ends[0].unread + 1) : 0); break;
        default: peek();
        }
    }
}

static void leave(int fd) {
    int flags = fcntl(fd, F_GETFL);
    NEED(!fcntl(fd, F_SETFL, flags | O_ASYNC) && !fcntl(fd, F_SETFL, flags), "O_ASYNC");
}

/* A reset is told once, and what came before it can be read still. */
static void told_by_option(void) {
    int e = -1;
    socklen_t len = sizeof e;
    NEED(!getsockopt(ends[0].fd, SOL_SOCKET, SO_ERROR, &e, &len) && e == ECONNRESET, "SO_ERROR %d", e);
}

static void told_by_send(void) {
    NEED(send(ends[0].fd, area, 10, MSG_NOSIGNAL) == -1 && errno == ECONNRESET, "send");
    for (int k = any(3); k > 0; k--) NEED(send(ends[0].fd, area, 10, MSG_NOSIGNAL) == -1 && errno == EPIPE, "send");
}

/* Before there is a lane, a receive takes bytes, and fails where it tells of whom. */
static void faulty(void) {
    struct sockaddr_in who;
    put(100);
    settle();
    NEED(recvfrom(ends[0].fd, area, 10, MSG_DONTWAIT, (void *)&who, (void *)8) == -1 && errno == EFAULT, "no EFAULT");
    taken(0, 10);
    for (int k = 0; k < 300; k++) {
        put(1);
        settle();
        count(0);
        if (k % 16 == 0) usleep(300);
    }
    take(ends[0].unread);
    for (int k = 0; k < 2; k++) close(ends[k].fd);
}

/* An end that waits for the other to go up gets urgent data instead: a receive goes past the mark. */
static void urgent(void) {
    struct pollfd p[2] = {{ends[0].fd, POLLIN, 0}, {ends[1].fd, POLLIN, 0}};
    for (int k = 0; k < 20; k++) poll(p, 2, 0), usleep(200);
    put(1);
    NEED(send(ends[1].fd, "u", 1, MSG_OOB | MSG_NOSIGNAL) == 1, "urgent");
    settle();
    take(1);
    char b;
    int past = any(2);
    if (past) NEED(recv(ends[0].fd, &b, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN, "there is no more");
    put(40);
    settle();
    NEED(sockatmark(ends[0].fd) == !past, "at the mark");
    if (past) count(0);
    for (int k = 0; k < 5; k++) peek();
    take(40);
    for (int k = 0; k < 2; k++) close(ends[k].fd);
}

static void one_round(void) {
    state = seed * 7919;
    join_ends();
    if (seed % 32 == 0) return faulty();
    if (seed % 32 == 16) return urgent();
    int on = 1;
    asks = any(2);
    if (asks) NEED(!setsockopt(ends[0].fd, IPPROTO_TCP, TCP_INQ, &on, sizeof on), "TCP_INQ");
    if (any(4)) up_unread(ONE_OF(1, 2, 100, 3000, 20000));
    else warm_up();
    if (any(2)) settle(), look(0);
    put(ONE_OF(0, 1, 31, 32, 33, 500, 5000));
    up += ends[0].unread > 0;
    settle();
    if (any(3) == 0) take(any(ends[0].unread + 1));
    int goes = any(4);
    if (goes) leave(ends[1].fd);
    if (any(3) == 0) take(any(ends[0].unread + 1));
    if (any(4)) put(ONE_OF(1, 31, 33, 700, 9000)), down += goes && ends[0].unread;
    int end = any(4);
    if (end == 3) { /* a reset */
        NEED(send(ends[0].fd, area, 10, MSG_NOSIGNAL) == 10, "send");
        settle();
        asks = 0;
    }
    if (end == 1) NEED(!shutdown(ends[1].fd, SHUT_WR), "shutdown");
    if (end >= 2) close(ends[1].fd), ends[1].closed = 1;
    ends[1].shut = end;
    settle();
    int told = end == 3 ? any(3) : 0;
    if (told == 1) told_by_option();
    if (told == 2) told_by_send();
    for (int k = 0; k < 4; k++) {
        count(end > 0), look(end > 0);
        if (!end && any(2)) put(ONE_OF(1, 200)), settle();
    }
    take(ends[0].unread);
    char b;
    if (end == 3 && !told) NEED(recv(ends[0].fd, &b, 1, 0) == -1 && errno == ECONNRESET, "no reset");
    if (end) NEED(recv(ends[0].fd, &b, 1, 0) == 0, "no end");
    else NEED(recv(ends[0].fd, &b, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN, "more than was sent");
    for (int k = 0; k < 2; k++)
        if (!ends[k].closed) close(ends[k].fd);
}

int main(int argc, char **argv) {
    need(argc == 3, "arguments");
    alarm(100);
    set_up();
    uint64_t first = strtoull(argv[1], NULL, 10), rounds = strtoull(argv[2], NULL, 10);
    for (seed = first; seed < first + rounds; seed++) one_round();
    need(up && down, "no round was of use");
    printf("result ok up %d down %d unsettled %d\n", up, down, unsettled);
    return 0;
}
