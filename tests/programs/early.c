/* A thread spawns a program, which takes long, and another one uses the connection that the program gets: it is on TCP when
 * the program begins, which reads there what comes. With `slow_spawn`. Prints "result ok". */
#define _GNU_SOURCE
#include <pthread.h>
#include <spawn.h>
#include <sys/wait.h>

#include "pairs.h"

enum { AMOUNT = 2000 };

static int a, b;

/* Ends long before there is a child. */
static void *uses(void *arg) {
    for (int k = 0; k < 500; k++) {
        by_lane(a, b);
        by_lane(b, a);
        sleep_us(1000);
    }
    return arg;
}

int main(int argc, char **argv) {
    if (argc == 3) return take_counted(atoi(argv[2]), AMOUNT);
    pthread_t thread;
    pid_t pid;
    int status;
    char buf[AMOUNT], of[16], *args[] = {"early", "take", of, 0};
    for (int i = 0; i < AMOUNT; i++) buf[i] = (char)i;
    dial(&a, &b);
    warm(a, b);
    sprintf(of, "%d", a);
    NEED(!pthread_create(&thread, 0, uses, 0));
    NEED(!posix_spawn(&pid, "/proc/self/exe", 0, 0, args, (char *[]){0}));
    NEED(!pthread_join(thread, 0));
    NEED(send(b, buf, AMOUNT, 0) == AMOUNT);
    NEED(waitpid(pid, &status, 0) == pid && status == 0);
    warm(a, b);
    puts("result ok");
}
