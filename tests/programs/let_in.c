/* A signal that only the mask of a wait lets in comes before a byte that is sent while the wait would sleep.
 *
 *     let_in ROUNDS
 */
#define _GNU_SOURCE
#include "pairs.h"
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/epoll.h>
#include <sys/select.h>

static int a, b;
static atomic_int due, over;
static volatile int handled;

static void count(int sig) {
    (void)sig;
    handled++;
}

static unsigned long now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000UL + t.tv_nsec;
}

/* Sends a byte a moment after it is due. */
static void *sender(void *none) {
    for (int n = 1;; n++) {
        while (atomic_load(&due) < n) {
            if (atomic_load(&over)) return none;
        }
        for (unsigned long t = now_ns(); now_ns() - t < 10000;) {
        }
        NEED(send(a, "x", 1, 0) == 1);
    }
}

static int wait_for(int how, int set, const sigset_t *mask) {
    struct epoll_event e;
    struct pollfd p = {b, POLLIN, 0};
    struct timespec t = {10, 0};
    fd_set in;
    FD_ZERO(&in);
    FD_SET(b, &in);
    switch (how) {
    case 0: return epoll_pwait(set, &e, 1, 10000, mask);
    case 1: return epoll_pwait2(set, &e, 1, &t, mask);
    case 2: return ppoll(&p, 1, &t, mask);
    default: return pselect(b + 1, &in, 0, 0, &t, mask);
    }
}

int main(int argc, char **argv) {
    NEED(argc == 2);
    int rounds = atoi(argv[1]), sent = 0;
    struct epoll_event e = {.events = EPOLLIN};
    sigset_t blocked, none;
    sigemptyset(&none);
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGUSR1);
    NEED(!sigaction(SIGUSR1, &(struct sigaction){.sa_handler = count, .sa_flags = SA_RESTART}, 0));
    NEED(!pthread_sigmask(SIG_BLOCK, &blocked, 0));
    dial(&a, &b);
    int set = epoll_create1(0);
    NEED(epoll_wait(set, &e, 1, 0) == 0 && !epoll_ctl(set, EPOLL_CTL_ADD, b, &e));
    warm(a, b);
    pthread_t t;
    NEED(!pthread_create(&t, 0, sender, 0));
    for (int how = 0; how < 4; how++) {
        int before = handled, interrupted = 0;
        for (int k = 0; k < rounds; k++) {
            char c;
            raise(SIGUSR1);
            atomic_store(&due, ++sent);
            int r = wait_for(how, set, &none);
            NEED(r == 1 || (r == -1 && errno == EINTR));
            interrupted += r == -1;
            NEED(recv(b, &c, 1, 0) == 1);
        }
        /* (A thread may be kept from its processor for a while.) */
        fprintf(stderr, "%d: %d of %d, %d handled\n", how, interrupted, rounds, handled - before);
        NEED(interrupted > rounds / 2 && handled - before >= interrupted);
    }
    atomic_store(&over, 1);
    NEED(!pthread_join(t, 0));
    puts("result ok");
}
