/* Waits that watch a connection for nothing but its end, or urgent data: what they are told, and that they sleep.
 *
 *     watched
 *
 * The other end is a process of its own, which is killed with bytes unread: a reset. Prints "result ok".
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <linux/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MSG 64
#define SOON 20000 /* ms */
#define NEED(ok) \
    do { \
        if (!(ok)) { \
            fprintf(stderr, "FAILED line %d: %s (errno %d, case %d)\n", __LINE__, #ok, errno, now_at); \
            _exit(1); \
        } \
    } while (0)

static int now_at, promoted, fd, orders[2];
static pid_t other;

/* Echoes while the message begins with 'e'. Then it does what it is told, and reads no more. */
static void peer(int l, int order) {
    char b[MSG], what;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    int c = accept(l, 0, 0), one = 1, n;
    NEED(c >= 0 && !setsockopt(c, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one));
    while (recv(c, b, MSG, MSG_WAITALL) == MSG && *b == 'e') NEED(send(c, b, MSG, 0) == MSG);
    while (read(order, &what, 1) == 1) {
        if (what == 's') NEED(send(c, b, MSG, 0) == MSG);
        if (what == 'f') NEED(!shutdown(c, SHUT_WR));
        if (what == 'u') /* until something is unread, which somebody has to ask for */
            do NEED(!ioctl(c, FIONREAD, &n)); while (!n && !usleep(1000));
        NEED(write(order, "d", 1) == 1);
    }
    _exit(0);
}

static void tell(char what) {
    NEED(write(orders[0], &what, 1) == 1 && read(orders[0], &what, 1) == 1);
}

static unsigned long on_tcp(void) {
    struct tcp_info i;
    socklen_t len = sizeof i;
    NEED(!getsockopt(fd, IPPROTO_TCP, TCP_INFO, &i, &len));
    return i.tcpi_bytes_sent + i.tcpi_bytes_received;
}

static void echo(void) {
    char b[MSG] = {'e'};
    NEED(send(fd, b, MSG, 0) == MSG && recv(fd, b, MSG, MSG_WAITALL) == MSG);
}

/* Until messages travel on the lane, and the other end does what it is told from then on. */
static void settle(void) {
    for (int turn = 0, lane = 0; !lane; turn++) {
        unsigned long before = on_tcp();
        NEED(turn < SOON);
        echo();
        lane = promoted ? turn > 2 && on_tcp() == before : turn > 2;
        usleep(1000);
    }
    char q[MSG] = {'q'};
    NEED(send(fd, q, MSG, 0) == MSG);
    tell('-');
}

static void begin(void) {
    struct sockaddr_in a = {.sin_family = AF_INET};
    socklen_t len = sizeof a;
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int l = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    NEED(!bind(l, (void *)&a, sizeof a) && !listen(l, 5) && !getsockname(l, (void *)&a, &len));
    NEED(!socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, orders));
    if (!(other = fork())) close(orders[0]), peer(l, orders[1]);
    close(l), close(orders[1]);
    fd = socket(AF_INET, SOCK_STREAM, 0);
    NEED(!connect(fd, (void *)&a, sizeof a) && !setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one));
}

static void killed(void) {
    kill(other, SIGKILL);
    NEED(waitpid(other, 0, 0) == other);
}

static void reset(void) {
    char b[100] = {0};
    NEED(send(fd, b, sizeof b, 0) == sizeof b);
    tell('u');
    killed();
}

static short watched;
static atomic_int sleeper;

static void *ending(void *arg) {
    struct pollfd p = {fd, watched, 0};
    atomic_store(&sleeper, (int)syscall(SYS_gettid));
    NEED(poll(&p, 1, SOON) == 1);
    short more = watched & POLLRDHUP;
    NEED(p.revents == (POLLERR | POLLHUP | more));
    return arg;
}

static void asleep(int tid) {
    char name[64], state = 0;
    snprintf(name, sizeof name, "/proc/self/task/%d/stat", tid);
    for (int seen = 0; seen < 5; seen = state == 'S' ? seen + 1 : 0) {
        FILE *f = fopen(name, "r");
        NEED(f && fscanf(f, "%*d %*s %c", &state) == 1);
        fclose(f);
        usleep(1000);
    }
}

/* One that sleeps since before the lane came, and one that began on it. */
static void death(int early) {
    pthread_t t;
    begin();
    if (!early) settle();
    atomic_store(&sleeper, 0);
    NEED(!pthread_create(&t, 0, ending, 0));
    while (!atomic_load(&sleeper)) usleep(100);
    asleep(atomic_load(&sleeper));
    if (early) settle();
    reset();
    NEED(!pthread_join(t, 0));
    close(fd), close(orders[0]);
}

static long ms_of(clockid_t which) {
    struct timespec t;
    clock_gettime(which, &t);
    return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* Nothing of what has come is what is waited for: it sleeps, and says so. */
static void quiet(char what) {
    begin();
    settle();
    if (what == 'r') reset();
    else tell(what);
    struct pollfd p = {fd, POLLIN, 0};
    NEED(poll(&p, 1, SOON) == 1);
    for (int k = 0; k < 3; k++) {
        long cpu = ms_of(CLOCK_THREAD_CPUTIME_ID), from = ms_of(CLOCK_MONOTONIC), took;
        fd_set x;
        FD_ZERO(&x);
        FD_SET(fd, &x);
        struct timeval t = {0, 400000};
        p.events = k == 1 ? POLLPRI : what == 's' ? POLLRDHUP : 0;
        if (!k) NEED(select(fd + 1, 0, 0, &x, &t) == 0 && !FD_ISSET(fd, &x));
        else if (what != 'r') NEED(poll(&p, 1, 400) == 0);
        else continue;
        took = ms_of(CLOCK_MONOTONIC) - from, cpu = ms_of(CLOCK_THREAD_CPUTIME_ID) - cpu;
        NEED(took >= 399 && cpu < 200);
    }
    if (what != 'r') killed();
    close(fd), close(orders[0]);
}

int main(void) {
    promoted = getenv("LD_PRELOAD") != 0;
    alarm(100);
    for (int k = 0; k < 6; k++, now_at++) {
        watched = (short[]){0, POLLPRI, POLLRDHUP}[k % 3];
        death(k < 3);
    }
    quiet('s'), now_at++;
    quiet('f'), now_at++;
    quiet('r');
    printf("result ok\n");
    return 0;
}
