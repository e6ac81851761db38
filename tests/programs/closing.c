/* The last descriptor of a connection is closed while a call of another thread sleeps on it: the call keeps the
 * connection, and so do the epoll sets that watch it, until it is over (close(2), epoll(7)).
 *
 *     closing ROUNDS     prints "result ok"
 */
#include "calls.h"
#include <pthread.h>
#include <stdatomic.h>

#define SOON 10000
#define WAITED 100 /* bytes that a receive waits for */
#define BIG (12 << 20)

static int round_no, sleeps;
static atomic_int sleeper;
static long slept;
static char *big;

#define NEED(ok) \
    do { \
        if (!(ok)) { \
            fprintf(stderr, "FAILED round %d line %d: %s (errno %d)\n", round_no, __LINE__, #ok, errno); \
            exit(1); \
        } \
    } while (0)

enum { PEEKS, TAKES, SENDS, HOW };

static void *in_call(void *arg) {
    char b[WAITED];
    atomic_store(&sleeper, (int)syscall(SYS_gettid));
    switch ((int)(long)arg) {
    case PEEKS: slept = recv(sleeps, b, WAITED, MSG_WAITALL | MSG_PEEK); break;
    case TAKES: slept = recv(sleeps, b, WAITED, MSG_WAITALL); break;
    default: slept = send(sleeps, big, BIG, MSG_NOSIGNAL);
    }
    return arg;
}

static void asleep(void) {
    char name[64], state = 0;
    while (!atomic_load(&sleeper)) usleep(100);
    snprintf(name, sizeof name, "/proc/self/task/%d/stat", atomic_load(&sleeper));
    for (int seen = 0; seen < 5; seen = state == 'S' ? seen + 1 : 0) {
        FILE *f = fopen(name, "r");
        NEED(f && fscanf(f, "%*d %*s %c", &state) == 1);
        fclose(f);
        usleep(2000);
    }
}

/* What the set tells of the connection; 0: nothing. */
static unsigned told_by(int ep, int ms) {
    struct epoll_event ev[4];
    int n = epoll_wait(ep, ev, 4, ms);
    NEED(n == 0 || (n == 1 && ev[0].data.u32 == 7));
    return n ? ev[0].events : 0;
}

static void watch(int ep, int fd, unsigned events) {
    struct epoll_event ev = {events, {.u32 = 7}};
    NEED(!epoll_ctl(ep, EPOLL_CTL_ADD, fd, &ev));
}

/* How: what sleeps. Its socket is in three sets: for all that there is, for what is new, and by a number closed before. */
static void one_round(int how) {
    int level = epoll_create1(0), edge = epoll_create1(0), copied = epoll_create1(0), spare = epoll_create1(0);
    join_ends();
    if (round_no % 4) warm_up();
    int fd = ends[0].fd, peer = ends[1].fd, copy = dup(fd);
    watch(level, fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP);
    watch(edge, fd, EPOLLIN | EPOLLET);
    watch(copied, copy, EPOLLIN);
    close(copy);
    NEED(told_by(level, SOON) == EPOLLOUT && !told_by(edge, 0) && !told_by(copied, 0));

    pthread_t t;
    sleeps = fd;
    atomic_store(&sleeper, 0);
    NEED(!pthread_create(&t, 0, in_call, (void *)(long)how));
    asleep();
    close(fd);
    NEED(dup2(spare, fd) == fd); /* the number is something else's */
    if (how != SENDS) NEED(told_by(level, SOON) == EPOLLOUT);
    NEED(!told_by(edge, 0) && !told_by(copied, 0));

    char b[WAITED] = {0};
    if (how != TAKES) {
        if (how == SENDS) NEED(!shutdown(peer, SHUT_WR));
        else NEED(send(peer, b, 10, 0) == 10);
        NEED(told_by(edge, SOON) & EPOLLIN && !told_by(edge, 0));
        for (int k = 0; k < 3; k++) NEED(told_by(level, SOON) & EPOLLIN && told_by(copied, SOON) & EPOLLIN);
    }
    if (how == SENDS) {
        for (long n = 0, got; n < BIG; n += got) NEED((got = recv(peer, area, AREA, 0)) > 0);
    } else {
        NEED(send(peer, b, WAITED, 0) == WAITED);
    }
    NEED(!pthread_join(t, 0) && slept == (how == SENDS ? BIG : WAITED));
    NEED(!told_by(level, 0) && !told_by(edge, 0) && !told_by(copied, 0));
    struct pollfd p = {peer, POLLIN, 0};
    NEED(poll(&p, 1, SOON) == 1);
    if (how != PEEKS) NEED(recv(peer, b, 1, 0) == 0);
    else NEED(recv(peer, b, 1, 0) == -1 && errno == ECONNRESET); /* with bytes unread */
    close(peer), close(fd), close(level), close(edge), close(copied), close(spare);
}

/* The call that sleeps began before the connection had a lane; then what its own end sends goes there. */
static void native_round(void) {
    char b[WAITED] = {0};
    join_ends();
    int fd = ends[0].fd, peer = ends[1].fd;
    pthread_t t;
    sleeps = fd;
    atomic_store(&sleeper, 0);
    NEED(!pthread_create(&t, 0, in_call, (void *)(long)TAKES));
    asleep();
    for (int k = 0; k < 60; k++) {
        NEED(send(fd, b, 8, 0) == 8 && recv(peer, b, 8, MSG_WAITALL) == 8);
        usleep(1000);
    }
    close(fd);
    struct pollfd p = {peer, POLLIN | POLLRDHUP, 0};
    NEED(poll(&p, 1, 1500) == 0); /* an end would be false */
    NEED(recv(peer, b, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN);
    NEED(send(peer, b, WAITED, 0) == WAITED);
    NEED(!pthread_join(t, 0) && slept == WAITED);
    NEED(poll(&p, 1, SOON) == 1 && recv(peer, b, 1, 0) == 0);
    close(peer);
}

int main(int argc, char **argv) {
    need(argc == 2, "arguments");
    alarm(100);
    set_up();
    big = calloc(1, BIG);
    for (int n = atoi(argv[1]); round_no < n; round_no++) one_round(round_no % HOW);
    for (int k = 0; k < 3; k++, round_no++) native_round();
    printf("result ok lanes %d\n", lanes);
    return 0;
}
