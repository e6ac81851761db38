/* What a call that sleeps is told, and once, whatever is done to its connection meanwhile.
 *
 *     told
 *
 * The other end is a process of its own, that does what it is told. Prints "result ok".
 */
#define _GNU_SOURCE
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "lanes.h"
#include "pairs.h"

#define LARGE (24 << 20)
#define KILLS 40

static int fd, orders[2];
static pid_t other;
static char *large, sink[1 << 20];

static void fill(char *to, long n) {
    for (long k = 0; k < n; k++) to[k] = (char)(k * 7 + k / 251);
}

/* Reads all there is, which is what `fill` makes. */
static long all(int c) {
    long n = 0, r;
    while ((r = recv(c, sink, sizeof sink, 0)) > 0) {
        for (long k = 0; k < r; k++) NEED(sink[k] == (char)((n + k) * 7 + (n + k) / 251));
        n += r;
    }
    NEED(!r);
    return n;
}

static void peer(int c, int order) {
    char what, b[64];
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    while (read(order, &what, 1) == 1) {
        if (what == 'e') NEED(recv(c, b, 64, MSG_WAITALL) == 64 && send(c, b, 64, 0) == 64);
        if (what == 's') NEED(send(c, large, 1000, 0) == 1000);
        if (what == 'd') { /* What is read makes room for more, which is answered with a reset. */
            NEED(!shutdown(c, SHUT_RDWR));
            for (long n = 0, r; n < 4 << 20 && (r = recv(c, sink, sizeof sink, MSG_DONTWAIT)) > 0; n += r) {}
        }
        if (what == 'a') NEED(all(c) == LARGE);
        NEED(write(order, "d", 1) == 1);
    }
    _exit(0);
}

static void tell(char what) {
    NEED(write(orders[0], &what, 1) == 1);
}

static void done(void) {
    char b;
    NEED(read(orders[0], &b, 1) == 1);
}

static void begin(void) {
    int c;
    NEED(!socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, orders));
    if (listener >= 0) close(listener), listener = -1;
    address.sin_family = AF_INET, address.sin_port = 0, address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t n = sizeof address;
    listener = socket(AF_INET, SOCK_STREAM, 0);
    NEED(!bind(listener, (void *)&address, n) && !listen(listener, 1) && !getsockname(listener, (void *)&address, &n));
    if (!(other = fork())) {
        close(orders[0]);
        NEED((c = accept(listener, 0, 0)) >= 0);
        close(listener);
        peer(c, orders[1]);
    }
    close(orders[1]);
    fd = socket(AF_INET, SOCK_STREAM, 0);
    NEED(!connect(fd, (void *)&address, n));
    for (int turn = 0, lane = 0; !lane; turn++) {
        char b[64] = {0};
        struct moved before = moved(fd);
        NEED(turn < 20000);
        tell('e');
        NEED(send(fd, b, 64, 0) == 64 && recv(fd, b, 64, MSG_WAITALL) == 64);
        done();
        lane = turn > 2 && (still(fd, before) || !under_shim());
        sleep_us(1000);
    }
}

static void end(void) {
    close(fd), close(orders[0]);
    kill(other, SIGKILL);
    NEED(waitpid(other, 0, 0) == other);
}

/* What the sleeper's call said, and its errno. */
static atomic_int sleeper, woken;
static long said;
static int why, flags;
static char got[100000];

static void *sends(void *arg) {
    sleeper = (int)syscall(SYS_gettid);
    said = send(fd, large, LARGE, MSG_NOSIGNAL), why = errno;
    woken = 1;
    return arg;
}

static void *receives(void *arg) {
    sleeper = (int)syscall(SYS_gettid);
    said = recv(fd, got, 2500, flags), why = errno;
    woken = 1;
    return arg;
}

static pthread_t asleep(void *(*what)(void *)) {
    char name[64], state = 0;
    pthread_t t;
    sleeper = woken = 0, said = -2;
    NEED(!pthread_create(&t, 0, what, 0));
    while (!sleeper) sleep_us(100);
    snprintf(name, sizeof name, "/proc/self/task/%d/stat", sleeper);
    for (int seen = 0; seen < 5; seen = state == 'S' ? seen + 1 : 0) {
        FILE *f = fopen(name, "r");
        NEED(f && fscanf(f, "%*d %*s %c", &state) == 1);
        fclose(f);
        sleep_us(1000);
    }
    return t;
}

static void handler(int sig) {
    (void)sig;
}

/* The time-out that counts is that of the call's begin. */
static void time_out_set_later(int receive) {
    struct timeval ms = {0, 1000};
    begin();
    flags = MSG_WAITALL;
    pthread_t t = asleep(receive ? receives : sends);
    NEED(!setsockopt(fd, SOL_SOCKET, receive ? SO_RCVTIMEO : SO_SNDTIMEO, &ms, sizeof ms));
    sleep_us(200000); /* (it might end in that time) */
    NEED(!woken);
    if (receive) {
        for (int k = 0; k < 3; k++) tell('s'), done();
        NEED(!pthread_join(t, 0) && said == 2500);
        return end();
    }
    tell('a');
    NEED(!pthread_join(t, 0) && said == LARGE);
    NEED(!shutdown(fd, SHUT_WR));
    done();
    end();
}

/* A handler with SA_RESTART has the call begin anew, and says nothing about what comes after it. */
static void restarted(int how) {
    struct sigaction a = {.sa_handler = handler, .sa_flags = SA_RESTART};
    NEED(!sigaction(SIGUSR1, &a, 0));
    begin();
    flags = how;
    pthread_t t = asleep(receives);
    NEED(!pthread_kill(t, SIGUSR1));
    for (int k = 0; k < 3; k++) {
        sleep_us(20000);
        NEED(!woken);
        tell('s'), done();
    }
    NEED(!pthread_join(t, 0) && said == 2500);
    end();
}

static int so_error(void) {
    int e = -1;
    socklen_t n = sizeof e;
    NEED(!getsockopt(fd, SOL_SOCKET, SO_ERROR, &e, &n));
    return e;
}

/* A reset behind a FIN, which ends a send after a part: the error is still to be told. */
static void shut_by_peer(void) {
    begin();
    pthread_t t = asleep(sends);
    tell('d'), done();
    NEED(!pthread_join(t, 0) && said > 0 && said < LARGE);
    struct pollfd p = {fd, POLLOUT, 0};
    NEED(poll(&p, 1, 0) == 1 && p.revents == (POLLOUT | POLLERR | POLLHUP));
    NEED(so_error() == EPIPE && so_error() == 0);
    NEED(send(fd, got, 1, MSG_NOSIGNAL) == -1 && errno == EPIPE);
    end();
}

/* The other end dies with bytes unread: one reset, told to one call. */
static void killed(void) {
    begin();
    pthread_t t = asleep(sends);
    kill(other, SIGKILL);
    NEED(!pthread_join(t, 0) && said != LARGE);
    struct pollfd p = {fd, POLLIN, 0};
    NEED(poll(&p, 1, 20000) == 1);
    int told = said < 0 ? why : 0;
    if (told) NEED(told == ECONNRESET || told == EPIPE);
    for (int k = 0; k < 3; k++) {
        int e = k == 1 ? recv(fd, got, 100, MSG_DONTWAIT) < 0 ? errno : 0 : so_error();
        NEED(!e || !told);
        told |= e;
    }
    NEED(told);
    NEED(send(fd, got, 1, MSG_NOSIGNAL) == -1 && errno == EPIPE);
    NEED(waitpid(other, 0, 0) == other);
    close(fd), close(orders[0]);
}

int main(void) {
    alarm(100);
    large = malloc(LARGE);
    fill(large, LARGE);
    for (int k = 0; k < 3; k++) time_out_set_later(0), time_out_set_later(1);
    restarted(MSG_WAITALL);
    restarted(MSG_WAITALL | MSG_PEEK);
    for (int k = 0; k < 3; k++) shut_by_peer();
    for (int k = 0; k < KILLS; k++) killed();
    printf("result ok\n");
    return 0;
}
