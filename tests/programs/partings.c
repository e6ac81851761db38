/* A parent and its child close the connections that both hold at the same moments, while threads of the parent make new
 * ones and use them.
 *
 *     partings ROUNDS      prints "result ok"
 */
#define _GNU_SOURCE
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <signal.h>
#include <unistd.h>

#include "pairs.h"

enum { SHARED = 12, THREADS = 2, KEPT = 6 };

static atomic_int *turn; /* of each of the two */
static atomic_int over;
static pthread_mutex_t dialing = PTHREAD_MUTEX_INITIALIZER;

static void new_pair(int *a, int *b) {
    pthread_mutex_lock(&dialing);
    dial(a, b);
    pthread_mutex_unlock(&dialing);
}

static void say(int from, int to, unsigned long what) {
    unsigned long got = 0;
    NEED(send(from, &what, sizeof what, 0) == sizeof what);
    NEED(recv(to, &got, sizeof got, MSG_WAITALL) == sizeof got && got == what);
}

/* Keeps some connections, and replaces one after the other. */
static void *user(void *arg) {
    unsigned long n = (unsigned long)arg << 48;
    int a[KEPT], b[KEPT];
    for (int k = 0; k < KEPT; k++) new_pair(&a[k], &b[k]);
    for (int k = 0; !over; k = (k + 1) % KEPT) {
        for (int j = 0; j < KEPT; j++) {
            say(a[j], b[j], ++n);
            say(b[j], a[j], ++n);
        }
        NEED(!close(a[k]) && !close(b[k]));
        new_pair(&a[k], &b[k]);
    }
    for (int k = 0; k < KEPT; k++) NEED(!close(a[k]) && !close(b[k]));
    return 0;
}

static void close_all(int me, const int *fds, int n) {
    for (int k = 0; k < n; k++) {
        turn[me] = k + 1;
        for (int spins = 0; turn[1 - me] < k + 1; spins++) {
            if (spins > 100) sched_yield();
        }
        NEED(!close(fds[k]));
    }
}

int main(int argc, char **argv) {
    int rounds = argc > 1 ? atoi(argv[1]) : 50;
    turn = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    NEED(turn != MAP_FAILED);
    alarm(100); /* what hangs */
    int a, b;
    dial(&a, &b);
    pthread_t t[THREADS];
    for (long k = 0; k < THREADS; k++) pthread_create(&t[k], 0, user, (void *)(k + 1));
    for (int r = 0; r < rounds; r++) {
        int fds[2 * SHARED];
        for (int k = 0; k < SHARED; k++) new_pair(&fds[2 * k], &fds[2 * k + 1]);
        turn[0] = turn[1] = 0;
        pid_t child = fork();
        NEED(child >= 0);
        if (!child) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            close_all(1, fds, 2 * SHARED);
            _exit(0);
        }
        close_all(0, fds, 2 * SHARED);
        int status;
        NEED(waitpid(child, &status, 0) == child && !status);
    }
    over = 1;
    for (int k = 0; k < THREADS; k++) pthread_join(t[k], 0);
    warm(a, b);
    puts("result ok");
    return 0;
}
