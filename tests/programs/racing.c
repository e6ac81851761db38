/* One thread sends or receives in a loop; another closes the number that it uses, puts something else there, or shuts
 * the connection down. Whichever call comes first: what sends have said arrives, all of it and then a clean end, and
 * receives find what was sent, in its order, by this number or the next.
 *
 *     racing ROUNDS
 *
 * Rounds of each kind; the other end is a process of its own. Prints "result ok".
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "pairs.h"

#define MOST 300000
enum { CLOSE, REPLACE, COPY, SHUT_SENDING, SHUT_BOTH, SENDER_KINDS };
static const char *const names[] = {"close", "dup2", "close of a copy", "SHUT_WR", "SHUT_RDWR"};

static int server_port, answers, null;
static uint64_t seed = 88172645463325252ull;

static unsigned any(unsigned n) {
    static __thread uint64_t s;
    if (!s) s = seed ^ (uintptr_t)&s * 2654435761u;
    s ^= s << 13, s ^= s >> 7, s ^= s << 17;
    return (s >> 20) % n;
}

static char byte_at(uint64_t at) {
    return (char)(at * 7 + at / 251 + at / 65521);
}

static void fill(char *b, uint64_t at, long n) {
    for (long k = 0; k < n; k++) b[k] = byte_at(at + k);
}

static void check(const char *b, uint64_t at, long n) {
    for (long k = 0; k < n; k++) NEED(b[k] == byte_at(at + k));
}

/* What the server has sent or received, and how it ended. */
struct answer {
    uint64_t bytes;
    int error;
};

/* The first byte says what the server is to do. */
static void serve(int fd, int out) {
    static char b[MOST];
    struct answer a = {0};
    char what;
    int slow = any(3) == 0;
    NEED(recv(fd, &what, 1, 0) == 1);
    for (long n; what == 's';) { /* it is sent to */
        n = recv(fd, b, 1 + any(slow ? 5000 : MOST), 0);
        if (n < 0) a.error = errno;
        if (n <= 0) break;
        check(b, a.bytes, n);
        a.bytes += n;
    }
    for (long n, total = 100000 + any(1500000); what == 'r' && a.bytes < total; a.bytes += n) {
        n = 1 + any(slow ? 300 : MOST - 1);
        fill(b, a.bytes, n);
        n = send(fd, b, n, MSG_NOSIGNAL);
        NEED(n > 0);
    }
    shutdown(fd, SHUT_WR);
    if (what == 'r') NEED(recv(fd, b, 1, 0) == 0);
    close(fd);
    NEED(write(out, &a, sizeof a) == sizeof a);
}

static int connected(const char *what) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(server_port)};
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    NEED(!connect(fd, (void *)&a, sizeof a) && send(fd, what, 1, 0) == 1);
    return fd;
}

struct user {
    int fd, small, nonblocking;
    atomic_int runs;
    uint64_t moved;
    int error;
};

static void *sender(void *arg) {
    struct user *u = arg;
    static __thread char b[MOST];
    for (u->runs = 1;;) {
        long n = 1 + any(u->small ? 300 : MOST - 1);
        fill(b, u->moved, n);
        n = send(u->fd, b, n, MSG_NOSIGNAL | (u->nonblocking ? MSG_DONTWAIT : 0));
        if (n > 0) u->moved += n;
        struct pollfd p = {u->fd, POLLOUT, 0};
        if (n < 0 && errno == EAGAIN) poll(&p, 1, 20);
        else if (n < 0) break;
    }
    u->error = errno;
    return 0;
}

static void *receiver(void *arg) {
    struct user *u = arg;
    static __thread char b[MOST];
    for (u->runs = 1;;) {
        long n = recv(u->fd, b, 1 + any(u->small ? 300 : MOST - 1), u->nonblocking ? MSG_DONTWAIT : 0);
        if (n > 0) check(b, u->moved, n);
        if (n > 0) u->moved += n;
        struct pollfd p = {u->fd, POLLIN, 0};
        if (n < 0 && errno == EAGAIN) poll(&p, 1, 20);
        else if (n <= 0) break;
    }
    return 0;
}

/* Until it is over with the number, in one way or another. */
static void strike(int fd, int kind) {
    switch (kind) {
    case CLOSE:
        NEED(!close(fd));
        break;
    case REPLACE:
        NEED(dup2(null, fd) == fd);
        break;
    case COPY: {
        int copy = dup(fd);
        NEED(!close(fd));
        sleep_us(any(300));
        NEED(!shutdown(copy, SHUT_WR));
        NEED(!close(copy));
        break;
    }
    default:
        NEED(!shutdown(fd, kind == SHUT_BOTH ? SHUT_RDWR : SHUT_WR));
    }
}

static pthread_t start(void *(*f)(void *), struct user *u) {
    pthread_t t;
    NEED(!pthread_create(&t, 0, f, u));
    while (!u->runs) sched_yield();
    sleep_us(200 + any(any(3) ? 3000 : 20000));
    return t;
}

static struct answer answer(void) {
    struct answer a;
    NEED(read(answers, &a, sizeof a) == sizeof a);
    return a;
}

static int by_lanes; /* connections of which TCP has not moved every byte */

static void send_round(int kind) {
    struct user u = {connected("s"), any(2), any(2)};
    pthread_t t = start(sender, &u);
    uint64_t tcp = info(u.fd).tcpi_bytes_acked;
    strike(u.fd, kind);
    pthread_join(t, 0);
    if (kind >= SHUT_SENDING || kind == REPLACE) close(u.fd);
    struct answer a = answer();
    if (a.error || a.bytes != u.moved) {
        fprintf(stderr, "%s: sends said %lu and then %s, %lu came and then %s\n", names[kind], u.moved, strerror(u.error), a.bytes,
                a.error ? strerror(a.error) : "the end");
        abort();
    }
    by_lanes += tcp < u.moved;
}

static void receive_round(int kind) {
    static char b[MOST];
    struct user u = {connected("r"), any(2), any(2)};
    int copy = dup(u.fd);
    pthread_t t = start(receiver, &u);
    strike(u.fd, kind);
    pthread_join(t, 0);
    if (kind == REPLACE) close(u.fd);
    for (long n; (n = recv(copy, b, 1 + any(MOST - 1), 0)); u.moved += n) {
        NEED(n > 0);
        check(b, u.moved, n);
    }
    by_lanes += info(copy).tcpi_bytes_received < u.moved;
    close(copy);
    NEED(answer().bytes == u.moved);
}

int main(int argc, char **argv) {
    int rounds = argc > 1 ? atoi(argv[1]) : 40, p[2], l = socket(AF_INET, SOCK_STREAM, 0);
    socklen_t n = sizeof address;
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    NEED(!bind(l, (void *)&address, n) && !listen(l, 100) && !getsockname(l, (void *)&address, &n) && !pipe(p));
    server_port = ntohs(address.sin_port);
    pid_t server = fork();
    if (!server) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (;;) serve(accept(l, 0, 0), p[1]);
    }
    answers = p[0];
    null = open("/dev/null", O_RDWR);
    alarm(110); /* who never comes back */
    for (int k = 0; k < rounds; k++) {
        for (int kind = 0; kind < SENDER_KINDS; kind++) send_round(kind);
        receive_round(CLOSE);
        receive_round(REPLACE);
    }
    NEED(!getenv("LD_PRELOAD") || by_lanes > rounds);
    kill(server, SIGKILL);
    waitpid(server, 0, 0);
    printf("result ok %d\n", by_lanes);
    return 0;
}
