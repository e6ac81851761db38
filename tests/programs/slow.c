/* Handlers that take their time: one that interrupts a thread's sleep keeps no other thread from hearing what
 * comes for it.
 *
 *     slow
 *
 * Prints "result ok".
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

#include "pairs.h"

#define ROUNDS 300

static int a[2], b[2], gate[2];
static atomic_int heard[2], inside;

/* Sleeps until the other thread has heard what is sent to it. */
static void waits(int sig) {
    char c;
    (void)sig;
    inside = 1;
    NEED(read(gate[0], &c, 1) == 1);
    inside = 0;
}

static void *listen_(void *arg) {
    int k = (int)(long)arg;
    char c;
    while (recv(b[k], &c, 1, 0) == 1) heard[k]++;
    return arg;
}

static void *interrupt(void *arg) {
    pthread_t *t = arg;
    for (int k = 0; k < ROUNDS; k++) {
        int who = k % 2, before = heard[!who];
        sleep_us(1000); /* both are asleep by now, as a rule */
        NEED(!pthread_kill(t[who], SIGUSR1));
        while (!inside) sleep_us(50);
        NEED(send(a[!who], "x", 1, 0) == 1);
        while (heard[!who] == before) sleep_us(50);
        NEED(write(gate[1], "g", 1) == 1);
        while (inside) sleep_us(50);
    }
    return arg;
}

static void leaders(void) {
    pthread_t t[2], i;
    struct sigaction s = {.sa_handler = waits, .sa_flags = SA_RESTART};
    NEED(!pipe(gate) && !sigaction(SIGUSR1, &s, 0));
    for (long k = 0; k < 2; k++) NEED(!pthread_create(&t[k], 0, listen_, (void *)k));
    NEED(!pthread_create(&i, 0, interrupt, t) && !pthread_join(i, 0));
    for (int k = 0; k < 2; k++) NEED(!shutdown(a[k], SHUT_WR) && !pthread_join(t[k], 0));
}

int main(void) {
    alarm(100); /* each round in which nobody listens costs a second, and that is every other one */
    for (int k = 0; k < 2; k++) dial(&a[k], &b[k]), warm(a[k], b[k]);
    leaders();
    printf("result ok\n");
    return 0;
}
