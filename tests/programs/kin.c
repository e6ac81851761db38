/* A connection that a parent and its children use at the same time, while the other end goes on.
 *
 *     kin writers      both send; children are killed in the middle of it
 *     kin children     both send, and it is the parent who is killed
 *     kin namespaces   both send, and each is process 1 of a pid namespace
 *     kin readers      both wait for records, in every way, and take them; no record is lost, or taken twice
 *     kin epoll        the same, most often by epoll sets of their own
 *     kin promotion    forks while the connection gets its lane; first the child uses it, then the parent
 *     kin zombies      children that have ended, and that nobody has waited for, hold nothing
 *     kin many         so do more of them than are remembered, of which each has used the connection
 *     kin adopted      a child waits in its parent's epoll set for what its sender, who waits for it, has sent before
 *     kin rings        a child goes on with connections whose rings have grown since the fork
 *
 * The other end is a process of another family. How far it and they are is in memory that all share.
 */
#define _GNU_SOURCE
#include "lanes.h"
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define RECORD 64
#define MOST 200000

struct record {
    uint32_t who, at;
    char fill[RECORD - 8];
};

static struct {
    atomic_int port;
    atomic_long sent, taken, want; /* records */
    atomic_uchar seen[MOST];
} *all;

static unsigned rnd = 7;

static unsigned any(unsigned n) {
    rnd = rnd * 1103515245 + 12345;
    return (rnd >> 12) % n;
}

static void need(int ok, const char *what) {
    if (ok) return;
    fprintf(stderr, "FAILED %s: %s\n", what, strerror(errno));
    kill(0, SIGABRT);
    abort();
}

static int listener(void) {
    struct sockaddr_in a = {.sin_family = AF_INET};
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t len = sizeof a;
    int l = socket(AF_INET, SOCK_STREAM, 0);
    need(!bind(l, (void *)&a, sizeof a) && !listen(l, 100), "listen");
    getsockname(l, (void *)&a, &len);
    atomic_store(&all->port, ntohs(a.sin_port));
    return l;
}

static int dial(void) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(atomic_load(&all->port))};
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    need(fd >= 0 && !connect(fd, (void *)&a, sizeof a), "connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return fd;
}

static int taken(int l) {
    int fd = accept(l, 0, 0), one = 1;
    need(fd >= 0, "accept");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return fd;
}

/* The other end, in a process of its own: it is forked before there is a socket. */
static pid_t other(void (*serve)(int)) {
    pid_t p = fork();
    if (!p) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        serve(listener());
        _exit(0);
    }
    while (!atomic_load(&all->port)) usleep(1000);
    return p;
}

static void pass(void) { usleep(50); }

static void put(int fd, uint32_t who, uint32_t at) {
    struct record r = {who, at, {0}};
    memset(r.fill, (int)(who + at), sizeof r.fill);
    need(send(fd, &r, RECORD, MSG_NOSIGNAL) == RECORD, "send");
}

static void check(const struct record *r) {
    for (size_t k = 0; k < sizeof r->fill; k++) need(r->fill[k] == (char)(r->who + r->at), "a torn record");
}

/* ---- writers, children ---- */

static void take_writers(int l) {
    for (;;) {
        static uint32_t next[MOST];
        memset(next, 0, sizeof next);
        int fd = taken(l);
        struct record r;
        for (ssize_t n; (n = recv(fd, &r, RECORD, MSG_WAITALL));) {
            need(n == RECORD, "recv");
            check(&r);
            need(r.who < MOST && r.at == next[r.who]++, "a record out of order");
            atomic_fetch_add(&all->taken, 1);
        }
        need(next[0] == atomic_load(&all->sent), "records are missing");
        need(send(fd, "x", 1, MSG_NOSIGNAL) == 1, "the answer");
        close(fd);
    }
}

/* Sends until the connection is on its lane. */
static uint32_t warm(int fd, uint32_t who) {
    uint32_t at = 0;
    struct moved m;
    do {
        m = moved(fd);
        usleep(500);
        put(fd, who, at++);
    } while (under_shim() && at < 1000 && !still(fd, m));
    return at;
}

static void answered(int fd) {
    char b;
    need(!shutdown(fd, SHUT_WR), "shutdown");
    need(recv(fd, &b, 1, 0) == 1, "the answer");
    close(fd);
}

/* Children send as well, and are killed. */
static void writers(int rounds) {
    pid_t o = other(take_writers);
    for (int k = 0; k < rounds; k++) {
        int fd = dial();
        uint32_t at = warm(fd, 0);
        for (int c = 1; c <= 30; c++) {
            for (unsigned k = 0, n = 5 + any(20); k < n; k++) put(fd, 0, at++);
            pid_t p = fork();
            need(p >= 0, "fork");
            if (!p) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                for (uint32_t k = 0; k < 30; k++) put(fd, c, k);
                pause();
            }
            for (unsigned k = 0, n = any(10); k < n; k++) put(fd, 0, at++);
            if (any(4)) usleep(any(500));
            kill(p, SIGKILL);
            if (any(2)) put(fd, 0, at++);
            need(waitpid(p, 0, 0) == p, "waitpid");
        }
        atomic_store(&all->sent, at);
        answered(fd);
    }
    kill(o, SIGKILL);
    waitpid(o, 0, 0);
}

/* Who made the connection is killed while both send, and a child goes on. */
static void children(int rounds) {
    pid_t o = other(take_writers);
    for (int k = 0; k < rounds; k++) {
        int go[2], status;
        char b;
        need(!pipe(go), "pipe");
        pid_t p = fork();
        if (!p) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            int fd = dial();
            uint32_t at = warm(fd, 1), mine = 0;
            for (int n = any(20); n--;) put(fd, 1, at++);
            if (!fork()) {
                prctl(PR_SET_PDEATHSIG, 0);
                need(write(go[1], "x", 1) == 1, "write");
                for (; mine < 60; mine++) {
                    put(fd, 0, mine);
                }
                atomic_store(&all->sent, mine);
                answered(fd);
                need(write(go[1], "y", 1) == 1, "write");
                _exit(0);
            }
            for (;;) { /* until it is killed, or the child has ended the stream */
                struct record r = {1, at, {0}};
                memset(r.fill, (int)(1 + at++), sizeof r.fill);
                if (send(fd, &r, RECORD, MSG_NOSIGNAL) != RECORD) pause();
                if (any(10) == 0) usleep(any(100));
            }
        }
        need(read(go[0], &b, 1) == 1, "read");
        if (any(4)) usleep(any(400));
        kill(p, SIGKILL);
        need(waitpid(p, &status, 0) == p && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "the parent");
        close(go[1]);
        need(read(go[0], &b, 1) == 1 && b == 'y', "the child");
        close(go[0]);
    }
    kill(o, SIGKILL);
    waitpid(o, 0, 0);
}

/* Parent and child are process 1 each, in a pid namespace of their own; both send. */
static pid_t first_of_a_namespace(void) {
    need(!unshare(CLONE_NEWPID), "unshare (as root)");
    pid_t p = fork();
    need(p >= 0, "fork");
    if (!p) need(getpid() == 1, "process 1");
    return p;
}

static void namespaces(int records) {
    pid_t o = other(take_writers), p = first_of_a_namespace();
    int status;
    if (!p) {
        int fd = dial(), go[2];
        char b;
        uint32_t at = warm(fd, 0);
        need(!pipe(go), "pipe");
        p = first_of_a_namespace();
        if (!p) {
            for (int k = 0; k < records; k++) {
                put(fd, 1, k);
                if (any(30) == 0) usleep(any(200));
            }
            close(fd);
            need(write(go[1], "x", 1) == 1, "write");
            _exit(0);
        }
        for (int k = 0; k < records; k++) {
            put(fd, 0, at++);
            if (any(30) == 0) usleep(any(200));
        }
        need(read(go[0], &b, 1) == 1, "read");
        for (int k = 0; k < 100; k++) put(fd, 0, at++);
        need(waitpid(p, &status, 0) == p && !status, "the second process 1");
        atomic_store(&all->sent, at);
        answered(fd);
        _exit(0);
    }
    need(waitpid(p, &status, 0) == p && !status, "the first process 1");
    kill(o, SIGKILL);
    waitpid(o, 0, 0);
}

/* ---- readers ---- */

static void send_readers(int l) {
    int fd = taken(l);
    long n = atomic_load(&all->want);
    for (long k = 0; k < n; k++) {
        while (k - atomic_load(&all->taken) > 100) pass();
        if (any(20) == 0) usleep(any(300));
        put(fd, 0, k);
    }
    while (atomic_load(&all->taken) < n) pass();
    shutdown(fd, SHUT_WR);
    char b;
    while (recv(fd, &b, 1, 0) > 0) {}
}

/* One record, or the end, or nothing yet. */
static int take_one(int fd, int flags) {
    struct record r;
    ssize_t n = recv(fd, &r, RECORD, flags);
    if (n < 0) {
        need(errno == EAGAIN && flags, "recv");
        return -1;
    }
    if (!n) return 0;
    need(n == RECORD, "a part of a record");
    check(&r);
    need(r.at < MOST && !atomic_fetch_add(&all->seen[r.at], 1), "a record was taken twice");
    atomic_fetch_add(&all->taken, 1);
    return 1;
}

/* Takes records until the end, or so many. True: the end. */
static int take_some(int fd, long most, unsigned ways) {
    int ep = epoll_create1(0);
    const uint32_t kinds[] = {EPOLLIN, EPOLLIN | EPOLLET, EPOLLIN | EPOLLONESHOT};
    struct epoll_event ev = {kinds[any(3)], {.fd = fd}}, got;
    int added = 0, end = 0;
    for (long k = 0; !end && k < most; k++) {
        int r = -1;
        switch (any(ways)) {
        case 0:
            r = take_one(fd, 0);
            break;
        case 1: {
            struct pollfd p = {fd, POLLIN, 0};
            need(poll(&p, 1, -1) == 1, "poll");
            r = take_one(fd, MSG_DONTWAIT);
            break;
        }
        case 2: {
            fd_set s;
            FD_ZERO(&s);
            FD_SET(fd, &s);
            need(select(fd + 1, &s, 0, 0, 0) == 1, "select");
            r = take_one(fd, MSG_DONTWAIT);
            break;
        }
        default:
            if (!added || ev.events != EPOLLIN) {
                need(!epoll_ctl(ep, added ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, fd, &ev), "epoll_ctl");
            }
            added = 1;
            need(epoll_wait(ep, &got, 1, -1) == 1 && got.data.fd == fd, "epoll_wait");
            r = take_one(fd, MSG_DONTWAIT);
        }
        end = !r;
    }
    close(ep);
    return end;
}

static void readers(long records, unsigned ways) {
    atomic_store(&all->want, records);
    pid_t o = other(send_readers);
    int fd = dial(), end = 0, status;
    struct moved m;
    do {
        m = moved(fd);
        end = take_some(fd, 150, 1); /* more than are under way */
    } while (under_shim() && !end && !still(fd, m)); /* until it is on its lane */
    for (unsigned c = 0; !end; c++) {
        end = take_some(fd, 20 + any(50), ways);
        pid_t p = fork();
        need(p >= 0, "fork");
        if (!p) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            rnd += c;
            take_some(fd, 20 + any(50), ways);
            if (any(2)) close(fd);
            _exit(0);
        }
        if (!end) end = take_some(fd, 20 + any(50), ways);
        /* (It has its share, or the end.) */
        need(waitpid(p, &status, 0) == p && !status, "a child");
    }
    for (long k = 0; k < records; k++) need(all->seen[k] == 1, "a record is missing");
    close(fd);
    need(waitpid(o, &status, 0) == o && !status, "the other end");
}

/* ---- promotion ---- */

static void *echo(void *arg) {
    int fd = (int)(long)arg;
    char b[4096];
    for (ssize_t r; (r = recv(fd, b, sizeof b, 0)) > 0;) need(send(fd, b, r, MSG_NOSIGNAL) == r, "echo");
    close(fd);
    return 0;
}

static void echoes(int l) {
    for (;;) {
        pthread_t t;
        pthread_create(&t, 0, echo, (void *)(long)taken(l));
        pthread_detach(t);
    }
}

static void exchange(int fd, int n) {
    char b[RECORD], got[RECORD];
    while (n--) {
        memset(b, n + fd, sizeof b);
        need(send(fd, b, sizeof b, MSG_NOSIGNAL) == sizeof b, "send");
        need(recv(fd, got, sizeof got, MSG_WAITALL) == sizeof got && !memcmp(b, got, sizeof b), "recv");
    }
}

static atomic_int over;

static void *busy(void *arg) {
    while (!atomic_load(&over)) {
        int fd = dial();
        exchange(fd, 30);
        close(fd);
    }
    return arg;
}

static void promotion(int rounds) {
    pid_t o = other(echoes);
    pthread_t t[2];
    for (int k = 0; k < 2; k++) pthread_create(&t[k], 0, busy, 0);
    for (int k = 0; k < rounds; k++) {
        int fd = dial(), status;
        exchange(fd, any(4));
        if (any(2)) usleep(any(1000));
        pid_t p = fork();
        if (!p) {
            exchange(fd, 20);
            _exit(0);
        }
        need(waitpid(p, &status, 0) == p && !status, "a child");
        exchange(fd, 20);
        close(fd);
    }
    atomic_store(&over, 1);
    for (int k = 0; k < 2; k++) pthread_join(t[k], 0);
    kill(o, SIGKILL);
    waitpid(o, 0, 0);
}

/* ---- zombies ---- */

/* Until it is on its lane. */
static void promoted(int fd) {
    struct timespec now, begin;
    int quiet = 0;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    do {
        struct moved m = moved(fd);
        exchange(fd, 1);
        quiet = still(fd, m) ? quiet + 1 : 0;
        if (!quiet) usleep(500);
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while (under_shim() && quiet < 5 && now.tv_sec - begin.tv_sec < 20);
    need(!under_shim() || quiet == 5, "a lane");
}

static void zombies(int rounds) {
    pid_t o = other(echoes), p;
    siginfo_t ended;
    for (int k = 0; k < rounds; k++) {
        int fd = dial();
        if (k % 2) promoted(fd); /* the child takes it down */
        p = fork();
        need(p >= 0, "fork");
        if (!p) {
            exchange(fd, k % 2 * 5);
            _exit(0);
        }
        need(!waitid(P_PID, p, &ended, WEXITED | WNOWAIT), "waitid");
        promoted(fd);
        close(fd);
        need(waitpid(p, 0, 0) == p, "waitpid");
    }
    kill(o, SIGKILL);
    waitpid(o, 0, 0);
}

static void many(int rounds) {
    pid_t o = other(echoes), p;
    for (int k = 0; k < rounds; k++) {
        int fd = dial();
        for (int n = 0; n < 20; n++) {
            p = fork();
            need(p >= 0, "fork");
            if (!p) {
                exchange(fd, 1);
                _exit(0);
            }
            need(waitpid(p, 0, 0) == p, "waitpid");
        }
        promoted(fd);
        close(fd);
    }
    kill(o, SIGKILL);
    waitpid(o, 0, 0);
}

/* ---- adopted ---- */

#define BATCH 20

/* Echoes until it is asked for a batch, and makes no call before that is taken. */
static void send_batches(int l) {
    for (long batches = 1;; batches++) {
        int fd = taken(l);
        struct record r;
        do {
            need(recv(fd, &r, RECORD, MSG_WAITALL) == RECORD, "recv");
            if (!r.who) put(fd, r.who, r.at);
        } while (!r.who);
        for (uint32_t k = 0; k < BATCH; k++) put(fd, 2, k);
        atomic_fetch_add(&all->sent, BATCH);
        while (atomic_load(&all->taken) < batches * BATCH) pass();
        close(fd);
    }
}

static void wait_in(int ep, int op, int fd, uint32_t kind) {
    struct epoll_event ev = {kind, {.fd = fd}}, got;
    if (op) need(!epoll_ctl(ep, op, fd, &ev), "epoll_ctl");
    need(epoll_wait(ep, &got, 1, -1) == 1 && got.data.fd == fd && got.events == EPOLLIN, "epoll_wait");
}

static void adopted(int rounds) {
    const uint32_t kinds[] = {EPOLLIN, EPOLLIN | EPOLLET, EPOLLIN | EPOLLONESHOT};
    pid_t o = other(send_batches), p;
    for (int k = 0; k < rounds; k++) {
        uint32_t kind = kinds[k % 3];
        int fd = dial(), ep = epoll_create1(0), quiet = 0, status;
        int again = kind == EPOLLIN ? 0 : EPOLL_CTL_MOD;
        struct record r;
        for (uint32_t n = 0; quiet < 5 && n < 5000 && (under_shim() || n < 20); n++) { /* until it is on its lane */
            struct moved m = moved(fd);
            put(fd, 0, n);
            wait_in(ep, n ? again : EPOLL_CTL_ADD, fd, kind);
            need(recv(fd, &r, RECORD, MSG_WAITALL) == RECORD, "recv");
            quiet = still(fd, m) ? quiet + 1 : 0;
            if (!quiet) usleep(500);
        }
        need(!under_shim() || quiet == 5, "a lane");
        put(fd, 1, 0);
        while (atomic_load(&all->sent) < (k + 1) * BATCH) pass();
        p = fork();
        need(p >= 0, "fork");
        if (!p) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            for (uint32_t n = 0; n < BATCH; n++) {
                wait_in(ep, again, fd, kind);
                need(recv(fd, &r, RECORD, MSG_DONTWAIT) == RECORD && r.at == n, "recv");
                check(&r);
            }
            atomic_fetch_add(&all->taken, BATCH);
            _exit(0);
        }
        need(waitpid(p, &status, 0) == p && !status, "the child");
        close(ep);
        close(fd);
    }
    kill(o, SIGKILL);
    waitpid(o, 0, 0);
}

/* ---- rings ---- */

#define MANY 40
#define LARGE (3 << 20)

static char large[LARGE];

static void receive(int fd, size_t n) {
    char b[10000];
    while (n) {
        ssize_t r = recv(fd, b, n < sizeof b ? n : sizeof b, 0);
        need(r > 0, "recv");
        n -= r;
    }
}

static void *send_large(void *arg) {
    need(send((int)(long)arg, large, LARGE, MSG_NOSIGNAL) == LARGE, "send");
    return 0;
}

/* Sends and receives as much as makes rings grow. */
static void *grow(void *arg) {
    int fd = (int)(long)arg;
    for (int k = 0; k < 3; k++) {
        pthread_t t;
        pthread_create(&t, 0, send_large, arg);
        usleep(3000); /* the rings are full */
        receive(fd, LARGE);
        pthread_join(t, 0);
    }
    return 0;
}

static void *serve_growing(void *arg) {
    int fd = (int)(long)arg;
    exchange(fd, 50);
    receive(fd, 1);
    grow(arg);
    exchange(fd, 50);
    return echo(arg);
}

static void growing(int l) {
    for (int k = 0; k < MANY; k++) {
        pthread_t t;
        pthread_create(&t, 0, serve_growing, (void *)(long)taken(l));
    }
    pause();
}

static void answer(int fd, int n) {
    char b[RECORD];
    while (n--) {
        need(recv(fd, b, sizeof b, MSG_WAITALL) == sizeof b, "recv");
        need(send(fd, b, sizeof b, MSG_NOSIGNAL) == sizeof b, "send");
    }
}

static void rings(void) {
    pid_t o = other(growing);
    int fd[MANY], go[2], status;
    char b;
    for (int k = 0; k < MANY; k++) answer(fd[k] = dial(), 50);
    need(!pipe(go), "pipe");
    pid_t p = fork();
    if (!p) {
        close(go[1]);
        need(read(go[0], &b, 1) == 1, "read");
        for (int k = 0; k < MANY; k++) {
            answer(fd[k], 50);
            exchange(fd[k], 50);
        }
        _exit(0);
    }
    for (int k = 0; k < MANY; k++) {
        need(send(fd[k], "x", 1, MSG_NOSIGNAL) == 1, "send");
        grow((void *)(long)fd[k]);
    }
    need(write(go[1], "x", 1) == 1, "write");
    need(waitpid(p, &status, 0) == p && !status, "the child");
    kill(o, SIGKILL);
    waitpid(o, 0, 0);
}

int main(int argc, char **argv) {
    const char *how = argc > 1 ? argv[1] : "";
    int n = argc > 2 ? atoi(argv[2]) : 0;
    all = mmap(0, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    setpgid(0, 0);
    alarm(60); /* a wait that nobody ends */
    if (!strcmp(how, "writers")) writers(n);
    if (!strcmp(how, "children")) children(n);
    if (!strcmp(how, "namespaces")) namespaces(n);
    if (!strcmp(how, "readers")) readers(n, 3);
    if (!strcmp(how, "epoll")) readers(n, 6);
    if (!strcmp(how, "promotion")) promotion(n);
    if (!strcmp(how, "zombies")) zombies(n);
    if (!strcmp(how, "many")) many(n);
    if (!strcmp(how, "adopted")) adopted(n);
    if (!strcmp(how, "rings")) rings();
    printf("result ok\n");
    return 0;
}
