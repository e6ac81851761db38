/* Connections that one thread makes while others fork: when all children have ended, each of them comes onto a lane.
 * Whether a child got a connection that is made in the instant of its fork, nobody knows but itself. */
#include "pairs.h"
#include <pthread.h>
#include <sys/wait.h>

/* (There is room for 8 holders; a child that finds none counts for good.) */
enum { THREADS = 3, PAIRS = 300 };

static volatile int stop;

static void *forks(void *arg) {
    int status;
    while (!stop) {
        pid_t child = fork();
        if (!child) _exit(0);
        NEED(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    }
    return arg;
}

int main(void) {
    static int a[PAIRS], b[PAIRS];
    pthread_t threads[THREADS];
    for (int k = 0; k < THREADS; k++) NEED(!pthread_create(&threads[k], 0, forks, 0));
    for (int k = 0; k < PAIRS; k++) {
        dial(&a[k], &b[k]);
        by_lane(a[k], b[k]);
    }
    stop = 1;
    for (int k = 0; k < THREADS; k++) pthread_join(threads[k], 0);
    for (int k = 0; k < PAIRS; k++) warm(a[k], b[k]);
    puts("result ok");
}
