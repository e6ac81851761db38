/* Handlers that call what they may (signal-safety(7)) while their thread is inside every other call.
 *
 *     handlers SECONDS SEED
 *
 * Two processes: a server that echoes, with one thread on epoll, one on poll, and one that blocks, and a
 * client whose threads block, poll, use epoll, and send in bulk. Each thread has two timers of some 200 us,
 * of which one has a handler without SA_RESTART. The handlers close spare connections, send and receive on
 * others and on the very one that their thread is inside, duplicate, shut down, register, poll, accept.
 * Every byte is compared. Prints "result ok ROUNDS SIGNALS CALLS" for the client.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define SPARES 8
#define RECORD 64
#define BULK (96 * 1024)

static double seconds;
static atomic_uint seed;
static atomic_long rounds, signals, calls;
static atomic_int stop;
static int listener = -1, idle = -1, port;
static atomic_int spares[SPARES];
static atomic_int watch = -1; /* an epoll set that handlers register spares in */
static const char *role = "main";

/* What a thread shares with its handlers, of which one may interrupt the other. */
static __thread volatile int own = -1;      /* the connection that this thread is inside */
static __thread volatile int own_records;   /* handlers may send whole records on it */
static __thread volatile int own_busy;
static __thread volatile unsigned own_seq;  /* of those, sent */
static __thread volatile unsigned own_seen; /* of those, come back */
static __thread unsigned long dice;

static void fail(const char *what) {
    char b[300];
    int n = snprintf(b, sizeof b, "FAILED %s %s: %s\n", role, what, strerror(errno));
    (void)!write(2, b, n);
    abort();
}

static void need(int ok, const char *what) {
    if (!ok) fail(what);
}

static unsigned long roll(void) {
    if (!dice) dice = (atomic_fetch_add(&seed, 1) * 0x9e3779b97f4a7c15UL) | 1;
    dice ^= dice << 13, dice ^= dice >> 7, dice ^= dice << 17;
    return dice;
}

/* Byte of a stream: every eight bytes name their place. */
static void pattern(unsigned char *p, size_t n, unsigned long id, unsigned long at) {
    for (size_t i = 0; i < n; i++) {
        unsigned long w = ((at + i) / 8 + 1) * 0x9e3779b97f4a7c15UL ^ id * 0xc2b2ae3d27d4eb4fUL;
        p[i] = w >> ((at + i) % 8 * 8);
    }
}

static void same(const unsigned char *p, size_t n, unsigned long id, unsigned long at) {
    unsigned char want[4096];
    for (size_t k = 0; k < n; k += sizeof want) {
        size_t m = n - k < sizeof want ? n - k : sizeof want;
        pattern(want, m, id, at + k);
        need(!memcmp(p + k, want, m), "bytes differ");
    }
}

/* ---- what handlers do ---- */

/* A connection that only handlers use: whoever gets the flag sends and receives some. */
struct side {
    atomic_flag busy;
    int fd;
    unsigned long sent, got;
} sides[4];

static void use_side(void) {
    struct side *s = &sides[roll() % 4];
    if (s->fd <= 0 || atomic_flag_test_and_set(&s->busy)) return;
    unsigned char b[700];
    size_t n = 1 + roll() % sizeof b;
    ssize_t r;
    if (s->sent - s->got < 30000) {
        pattern(b, n, s - sides + 1000, s->sent);
        struct iovec v[2] = {{b, n / 2}, {b + n / 2, n - n / 2}};
        switch (roll() % 3) {
        case 0: r = send(s->fd, b, n, MSG_NOSIGNAL); break;
        case 1: r = write(s->fd, b, n); break;
        default: r = writev(s->fd, v, 2); break;
        }
        need(r > 0 || errno == EAGAIN || errno == EINTR, "send in a handler");
        if (r > 0) s->sent += r;
    }
    r = roll() % 2 ? recv(s->fd, b, n, 0) : read(s->fd, b, n);
    need(r > 0 || (r < 0 && (errno == EAGAIN || errno == EINTR)), "recv in a handler");
    if (r > 0) {
        same(b, r, s - sides + 1000, s->got);
        s->got += r;
    }
    atomic_flag_clear(&s->busy);
}

static void record(unsigned char *b, int origin, unsigned seq) {
    memset(b, 0, RECORD);
    b[0] = 0xa5;
    b[1] = origin;
    memcpy(b + 4, &seq, 4);
    pattern(b + 8, RECORD - 8, origin, seq * 64UL);
}

/* Connections with unread bytes in one set, whose thread does nothing but ask that set. */
#define CHURN 16
static __thread atomic_int *churned; /* -1: closed by a handler */

static void handler(int sig) {
    int e = errno;
    atomic_fetch_add(&signals, 1);
    (void)sig;
    if (churned) {
        /* In one step: the other handler, which comes in between, may want to close the same one. */
        int fd = atomic_exchange(&churned[roll() % CHURN], -1);
        if (fd >= 0) need(close(fd) == 0, "close in a handler");
        if (fd >= 0) atomic_fetch_add(&calls, 1);
        errno = e;
        return;
    }
    atomic_fetch_add(&calls, 1);
    unsigned char b[RECORD];
    int k = roll() % SPARES;
    switch (roll() % 12) {
    case 0: { /* close: a spare connection, with or without unread bytes */
        int fd = atomic_exchange(&spares[k], -1);
        if (fd >= 0) need(close(fd) == 0, "close in a handler");
        break;
    }
    case 1:
    case 2: use_side(); break;
    case 3: /* a record on the very connection */
        if (own >= 0 && own_records && own_seq - own_seen < 50 && !own_busy) {
            own_busy = 1; /* (of handlers that interrupt each other) */
            record(b, 1, own_seq);
            ssize_t r = send(own, b, RECORD, MSG_DONTWAIT | MSG_NOSIGNAL);
            need(r == RECORD || (r < 0 && errno == EAGAIN), "send on the own connection");
            if (r == RECORD) own_seq++;
            own_busy = 0;
        }
        break;
    case 4: /* looks at the very connection */
        if (own >= 0) {
            ssize_t r = recv(own, b, sizeof b, MSG_DONTWAIT | MSG_PEEK);
            need(r >= 0 || errno == EAGAIN || errno == ECONNRESET, "peek at the own connection");
        }
        break;
    case 5: {
        struct pollfd p[2] = {{own, POLLIN, 0}, {sides[0].fd, POLLIN | POLLOUT, 0}};
        need(poll(p, 2, 0) >= 0, "poll in a handler");
        break;
    }
    case 6: { /* a spare's number comes to mean another spare */
        int a = atomic_exchange(&spares[k], -1), c = atomic_exchange(&spares[(k + 1) % SPARES], -1);
        if (a >= 0 && c >= 0) need(dup2(a, c) == c, "dup2 in a handler");
        if (a >= 0) close(a);
        if (c >= 0) atomic_store(&spares[(k + 1) % SPARES], c);
        break;
    }
    case 7: {
        int fd = atomic_exchange(&spares[k], -1);
        if (fd >= 0) {
            shutdown(fd, (int)(roll() % 3));
            close(fd);
        }
        break;
    }
    case 8: {
        int fd = atomic_exchange(&spares[k], -1), ep = atomic_load(&watch);
        if (fd >= 0 && ep >= 0) {
            struct epoll_event ev = {EPOLLIN | (roll() % 2 ? EPOLLET : 0), {.fd = -2}};
            if (epoll_ctl(ep, EPOLL_CTL_ADD, fd, &ev) && errno != EEXIST) fail("epoll_ctl");
            if (roll() % 2) epoll_ctl(ep, EPOLL_CTL_DEL, fd, &ev);
        }
        if (fd >= 0) atomic_store(&spares[k], fd);
        break;
    }
    case 9: { /* speaks on a spare, whose answer nobody reads */
        int fd = atomic_exchange(&spares[k], -1);
        if (fd >= 0) {
            send(fd, b, 10, MSG_DONTWAIT | MSG_NOSIGNAL);
            atomic_store(&spares[k], fd);
        }
        break;
    }
    case 10: {
        int fd = accept(idle, 0, 0); /* nobody is there */
        if (fd >= 0) close(fd);
        int d = dup(sides[1].fd);
        if (d >= 0) close(d);
        break;
    }
    default: {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (fd >= 0) close(fd);
        fcntl(sides[2].fd, F_GETFL);
        int on;
        socklen_t l = sizeof on;
        getsockopt(sides[3].fd, SOL_SOCKET, SO_ERROR, &on, &l);
        break;
    }
    }
    errno = e;
}

/* Two timers for this thread. */
static void timers(void) {
    for (int k = 0; k < 2; k++) {
        struct sigevent ev = {0};
        ev.sigev_notify = SIGEV_THREAD_ID;
        ev.sigev_signo = SIGRTMIN + k;
        ev._sigev_un._tid = syscall(SYS_gettid);
        timer_t t;
        need(!timer_create(CLOCK_MONOTONIC, &ev, &t), "timer_create");
        long ns = 150000 + roll() % 200000;
        struct itimerspec s = {{0, ns}, {0, ns}};
        timer_settime(t, 0, &s, 0);
    }
}

static void install(void) {
    struct sigaction a = {0}, old;
    a.sa_handler = handler;
    a.sa_flags = SA_RESTART;
    need(!sigaction(SIGRTMIN, &a, 0), "sigaction");
    a.sa_flags = SA_NODEFER;
    need(!sigaction(SIGRTMIN + 1, &a, 0), "sigaction");
    need(!sigaction(SIGRTMIN + 1, 0, &old) && old.sa_handler == handler, "the handler that was set");
    need((old.sa_flags & (SA_NODEFER | SA_RESTART | SA_SIGINFO)) == SA_NODEFER, "flags");
}

static void mask(int how) {
    sigset_t s;
    sigemptyset(&s);
    sigaddset(&s, SIGRTMIN);
    sigaddset(&s, SIGRTMIN + 1);
    pthread_sigmask(how, &s, 0);
}

/* ---- ordinary work ---- */

static int dial(char kind) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port)};
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    mask(SIG_BLOCK);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    need(fd >= 0, "socket");
    need(!connect(fd, (void *)&a, sizeof a), "connect");
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    need(write(fd, &kind, 1) == 1, "first byte");
    mask(SIG_UNBLOCK);
    return fd;
}

/* False: a spare's other end is closed. */
static int send_all(int fd, const unsigned char *p, size_t n) {
    while (n) {
        ssize_t r = send(fd, p, n, MSG_NOSIGNAL);
        if (r < 0 && errno == EINTR) continue;
        if (r < 0 && errno == EAGAIN) {
            struct pollfd q = {fd, POLLOUT, 0};
            if (poll(&q, 1, 1000) < 0) need(errno == EINTR, "poll");
            continue;
        }
        if (r < 0 && role[0] == 's' && (errno == EPIPE || errno == ECONNRESET)) return 0;
        need(r > 0, "send");
        p += r, n -= r;
    }
    return 1;
}

/* One record in; what handlers sent comes between. */
static void await_record(int fd, int how, int ep, unsigned seq) {
    unsigned char b[RECORD], want[RECORD];
    for (;;) {
        size_t n = 0;
        while (n < RECORD) {
            if (how == 1) {
                struct pollfd q = {fd, POLLIN, 0};
                int r = poll(&q, 1, 2000);
                if (r < 0) need(errno == EINTR, "poll");
                if (r <= 0) continue;
            } else if (how == 2) {
                struct epoll_event ev[8];
                int r = epoll_wait(ep, ev, 8, 2000), mine = 0;
                if (r < 0) need(errno == EINTR, "epoll_wait");
                for (int k = 0; k < r; k++) mine |= ev[k].data.fd == fd;
                if (!mine) continue;
            } else if (how == 3) {
                fd_set s;
                FD_ZERO(&s);
                FD_SET(fd, &s);
                struct timeval t = {2, 0};
                int r = select(fd + 1, &s, 0, 0, &t);
                if (r < 0) need(errno == EINTR, "select");
                if (r <= 0) continue;
            }
            ssize_t r = recv(fd, b + n, RECORD - n, roll() % 4 ? 0 : MSG_WAITALL);
            if (r < 0 && (errno == EINTR || errno == EAGAIN)) continue;
            need(r > 0, "recv");
            n += r;
        }
        unsigned s;
        memcpy(&s, b + 4, 4);
        record(want, b[1] == 1, s);
        need(b[0] == 0xa5 && !memcmp(b, want, RECORD), "a record differs");
        if (b[1] == 1) {
            need(s == own_seen, "a handler's record is lost, or comes twice");
            own_seen++;
            continue;
        }
        need(s == seq, "a record is lost, or comes twice");
        return;
    }
}

static void *requests(void *arg) {
    int how = (int)(long)arg, ep = -1;
    int fd = dial('E');
    if (how == 2) {
        ep = epoll_create1(0);
        struct epoll_event ev = {EPOLLIN, {.fd = fd}};
        need(!epoll_ctl(ep, EPOLL_CTL_ADD, fd, &ev), "epoll_ctl");
        fcntl(fd, F_SETFL, O_NONBLOCK);
        atomic_store(&watch, ep);
    }
    own = fd, own_records = 1;
    timers();
    unsigned char b[RECORD];
    for (unsigned seq = 0; !atomic_load(&stop); seq++) {
        record(b, 0, seq);
        send_all(fd, b, RECORD);
        await_record(fd, how, ep, seq);
        atomic_fetch_add(&rounds, 1);
    }
    mask(SIG_BLOCK);
    own = -1;
    return 0;
}

static unsigned long bulk_sent;
static atomic_int bulk_done;

static void *bulk_out(void *arg) {
    int fd = (int)(long)arg;
    unsigned char *b = malloc(BULK);
    own = fd;
    timers();
    while (!atomic_load(&stop)) {
        size_t n = 1 + roll() % BULK;
        pattern(b, n, 77, bulk_sent);
        send_all(fd, b, n);
        bulk_sent += n;
    }
    mask(SIG_BLOCK);
    atomic_store(&bulk_done, 1);
    shutdown(fd, SHUT_WR);
    return 0;
}

static void *bulk_in(void *arg) {
    int fd = (int)(long)arg;
    unsigned char *b = malloc(BULK);
    unsigned long got = 0;
    timers();
    for (;;) {
        ssize_t r = recv(fd, b, 1 + roll() % BULK, 0);
        if (r < 0 && errno == EINTR) continue;
        need(r >= 0, "bulk recv");
        if (r == 0) break;
        same(b, r, 77, got);
        got += r;
        atomic_fetch_add(&rounds, 1);
    }
    mask(SIG_BLOCK);
    need(atomic_load(&bulk_done) && got == bulk_sent, "the bulk stream is short");
    return 0;
}

static void *churn(void *arg) {
    (void)arg;
    atomic_int fds[CHURN];
    int ep = epoll_create1(0);
    struct epoll_event evs[CHURN * 2];
    for (int k = 0; k < CHURN; k++) fds[k] = -1;
    timers();
    while (!atomic_load(&stop)) {
        mask(SIG_BLOCK);
        unsigned char b[RECORD] = {0};
        int seen[CHURN] = {0}, left = 0, n;
        for (int k = 0; k < CHURN; k++) {
            if (fds[k] < 0) {
                fds[k] = dial('E');
                mask(SIG_BLOCK);
                for (int n = 0; n < 2; n++) {
                    send_all(fds[k], b, RECORD);
                    need(recv(fds[k], b, RECORD, MSG_WAITALL) == RECORD, "an answer");
                }
                send_all(fds[k], b, RECORD);
                fcntl(fds[k], F_SETFL, O_NONBLOCK);
                struct epoll_event ev = {EPOLLIN, {.u32 = k}};
                need(!epoll_ctl(ep, EPOLL_CTL_ADD, fds[k], &ev), "epoll_ctl ADD");
            }
            left++;
        }
        for (int tries = 0; left; tries++) {
            need(tries < 10000, "a connection is not reported");
            n = epoll_wait(ep, evs, CHURN * 2, 1000);
            need(n >= 0, "epoll_wait");
            for (int k = 0; k < n; k++) left -= !seen[evs[k].data.u32]++;
            if (left) usleep(1000); /* what is ready is listed at once; the server has to get its turn */
        }
        churned = fds;
        mask(SIG_UNBLOCK);
        for (int turns = 0; turns < 2000; turns++) {
            int was[CHURN];
            for (int k = 0; k < CHURN; k++) was[k] = fds[k];
            n = epoll_wait(ep, evs, CHURN * 2, 0);
            need(n >= 0 || errno == EINTR, "epoll_wait");
            for (int k = 0; k < n; k++) need(was[evs[k].data.u32] >= 0, "a closed one is reported");
        }
        mask(SIG_BLOCK);
        churned = 0;
        atomic_fetch_add(&rounds, 1);
        mask(SIG_UNBLOCK);
    }
    mask(SIG_BLOCK);
    return 0;
}

/* New spares for those that handlers have closed. */
static void *refill(void *arg) {
    (void)arg;
    timers();
    while (!atomic_load(&stop)) {
        for (int k = 0; k < SPARES; k++) {
            if (atomic_load(&spares[k]) >= 0) continue;
            int fd = dial('E'), none = -1;
            unsigned char b[RECORD];
            mask(SIG_BLOCK);
            for (int n = 0; n < 3; n++) {
                send_all(fd, b, RECORD);
                need(recv(fd, b, RECORD, MSG_WAITALL) == RECORD, "a spare's answer");
            }
            fcntl(fd, F_SETFL, O_NONBLOCK);
            mask(SIG_UNBLOCK);
            if (!atomic_compare_exchange_strong(&spares[k], &none, fd)) close(fd);
        }
        usleep(300);
    }
    mask(SIG_BLOCK);
    return 0;
}

/* ---- the server ---- */

struct peer {
    int fd;
    size_t n, at;
    unsigned char b[16384];
};

/* Echoes what there is. 0: the connection is done. */
static int echo(struct peer *p) {
    for (;;) {
        own = p->fd;
        while (p->at < p->n) {
            ssize_t r = send(p->fd, p->b + p->at, p->n - p->at, MSG_NOSIGNAL | MSG_DONTWAIT);
            if (r < 0 && errno == EINTR) continue;
            if (r < 0 && errno == EAGAIN) return 1;
            if (r < 0) return 0;
            p->at += r;
        }
        ssize_t r = recv(p->fd, p->b, sizeof p->b, MSG_DONTWAIT);
        if (r < 0 && errno == EINTR) continue;
        if (r < 0 && errno == EAGAIN) return 1;
        if (r <= 0) return 0;
        p->n = r, p->at = 0;
    }
}

static int hand[3][2]; /* accepted connections, for the three threads */

static struct peer *taken(int fd) {
    struct peer *p = calloc(1, sizeof *p);
    p->fd = fd;
    return p;
}

static void *serve_epoll(void *arg) {
    (void)arg;
    int ep = epoll_create1(0);
    struct epoll_event ev = {EPOLLIN, {.ptr = 0}}, evs[64];
    epoll_ctl(ep, EPOLL_CTL_ADD, hand[0][0], &ev);
    timers();
    for (;;) {
        int n = epoll_wait(ep, evs, 64, -1);
        if (n < 0) need(errno == EINTR, "epoll_wait");
        for (int k = 0; k < n; k++) {
            struct peer *p = evs[k].data.ptr;
            int fd;
            if (!p) {
                ssize_t r = read(hand[0][0], &fd, sizeof fd);
                if (r < 0 && (errno == EINTR || errno == EAGAIN)) continue;
                if (r == 0) return 0;
                fcntl(fd, F_SETFL, O_NONBLOCK);
                ev.events = EPOLLIN | EPOLLOUT | EPOLLET;
                ev.data.ptr = taken(fd);
                need(!epoll_ctl(ep, EPOLL_CTL_ADD, fd, &ev), "epoll_ctl ADD");
            } else if (!echo(p)) {
                own = -1;
                close(p->fd);
                free(p);
            }
            own = -1;
        }
    }
}

static void *serve_poll(void *arg) {
    (void)arg;
    static struct pollfd q[256];
    static struct peer *peers[256];
    int n = 1;
    q[0] = (struct pollfd){hand[1][0], POLLIN, 0};
    timers();
    for (;;) {
        int r = poll(q, n, -1);
        if (r < 0) need(errno == EINTR, "poll");
        if (r <= 0) continue;
        for (int k = n - 1; k > 0; k--) {
            if (!q[k].revents) continue;
            if (!echo(peers[k])) {
                own = -1;
                close(q[k].fd);
                free(peers[k]);
                q[k] = q[--n], peers[k] = peers[n];
                continue;
            }
            q[k].events = peers[k]->at < peers[k]->n ? POLLOUT : POLLIN;
            own = -1;
        }
        int fd;
        if (q[0].revents) {
            ssize_t got = read(hand[1][0], &fd, sizeof fd);
            if (got == 0) return 0;
            if (got > 0 && n < 256) {
                q[n] = (struct pollfd){fd, POLLIN, 0};
                peers[n++] = taken(fd);
            }
        }
    }
}

static void *serve_one(void *arg) {
    struct peer *p = arg;
    own = p->fd;
    timers();
    for (;;) {
        ssize_t r = recv(p->fd, p->b, sizeof p->b, 0);
        if (r < 0 && errno == EINTR) continue;
        if (r <= 0) break;
        if (!send_all(p->fd, p->b, r)) break;
    }
    mask(SIG_BLOCK);
    own = -1;
    close(p->fd);
    free(p);
    return 0;
}

static void *guard(void *arg) {
    (void)arg;
    mask(SIG_BLOCK);
    long last = -1;
    for (;;) {
        sleep(20);
        long now = atomic_load(role[0] == 's' ? &signals : &rounds);
        need(now != last, "nothing moves for 20 seconds");
        last = now;
    }
    return 0;
}

static void side_up(void) {
    for (int k = 0; k < 4; k++) {
        int fd = dial('E');
        fcntl(fd, F_SETFL, O_NONBLOCK);
        sides[k].fd = fd;
    }
}

static int server(void) {
    role = "server";
    pthread_t t;
    pthread_create(&t, 0, guard, 0);
    pthread_create(&t, 0, serve_epoll, 0);
    pthread_create(&t, 0, serve_poll, 0);
    int next = 0;
    mask(SIG_BLOCK);
    for (;;) {
        struct pollfd q = {listener, POLLIN, 0};
        if (poll(&q, 1, -1) <= 0) continue;
        int fd = accept(listener, 0, 0);
        if (fd < 0) continue;
        char kind;
        if (recv(fd, &kind, 1, 0) != 1) {
            close(fd);
            continue;
        }
        if (kind == 'Q') break;
        int one = 1, to = next++ % 3;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        if (kind == 'B' || to == 2) {
            mask(SIG_UNBLOCK);
            pthread_create(&t, 0, serve_one, taken(fd));
            pthread_detach(t);
            mask(SIG_BLOCK);
        } else {
            need(write(hand[to][1], &fd, sizeof fd) == sizeof fd, "hand over");
        }
    }
    return 0;
}

int main(int argc, char **argv) {
    seconds = argc > 1 ? atof(argv[1]) : 3;
    atomic_store(&seed, argc > 2 ? atoi(argv[2]) : 1);
    for (int k = 0; k < SPARES; k++) atomic_store(&spares[k], -1);
    struct sockaddr_in a = {.sin_family = AF_INET};
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t l = sizeof a;
    listener = socket(AF_INET, SOCK_STREAM, 0);
    need(!bind(listener, (void *)&a, sizeof a) && !listen(listener, 200), "listen");
    getsockname(listener, (void *)&a, &l);
    port = ntohs(a.sin_port);
    idle = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    need(!listen(idle, 5), "listen");
    for (int k = 0; k < 3; k++) need(!pipe(hand[k]), "pipe");
    fcntl(hand[0][0], F_SETFL, O_NONBLOCK), fcntl(hand[1][0], F_SETFL, O_NONBLOCK);
    install();
    pid_t child = fork();
    if (!child) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        return server();
    }
    close(listener);
    role = "client";
    side_up();
    int bulk = dial('B');
    pthread_t t[8], g;
    pthread_create(&g, 0, guard, 0);
    for (long k = 0; k < 4; k++) pthread_create(&t[k], 0, requests, (void *)k);
    pthread_create(&t[4], 0, bulk_out, (void *)(long)bulk);
    pthread_create(&t[5], 0, bulk_in, (void *)(long)bulk);
    pthread_create(&t[6], 0, refill, 0);
    pthread_create(&t[7], 0, churn, 0);
    mask(SIG_BLOCK);
    usleep((useconds_t)(seconds * 1e6));
    atomic_store(&stop, 1);
    for (int k = 0; k < 8; k++) pthread_join(t[k], 0);
    dial('Q');
    int st;
    need(waitpid(child, &st, 0) == child && st == 0, "the server ended badly");
    printf("result ok %ld %ld %ld\n", atomic_load(&rounds), atomic_load(&signals), atomic_load(&calls));
    return 0;
}
