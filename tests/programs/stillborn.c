/* Children that are killed before their first own instruction (traced), while their parent has connections.
 *
 *     stillborn ROUNDS    In each round, connections of which this program holds both ends get their lanes after their
 *                         process has made so many such children, beside one that lives for a while and holds them, too.
 *
 * Prints "result ok".
 */
#define _GNU_SOURCE
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include "pairs.h"

enum { MANY = 60, FEW = 2 };

static struct shared {
    volatile int ready, traced, spare;
} *s;

static void until(volatile int *word) {
    for (long k = 0; !*word; k++, sleep_us(200)) NEED(k < 100000);
}

static void stillborn(void) {
    int status;
    pid_t child = fork();
    NEED(child >= 0);
    if (!child) _exit(1);
    NEED(waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

static void work(int rounds) {
    s->ready = 1;
    until(&s->traced);
    for (int k = 0; k < rounds; k++) {
        int a, b, status;
        dial(&a, &b);
        for (int n = k ? FEW : MANY; n; n--) stillborn();
        s->spare = 1;
        pid_t child = fork();
        if (!child) sleep_us(20000), _exit(0);
        NEED(waitpid(child, &status, 0) == child && !status);
        s->spare = 0;
        warm(a, b);
        stillborn();
        warm(a, b);
        close(a), close(b);
    }
    printf("result ok\n"), fflush(stdout);
    _exit(0);
}

/* Kills the children of the worker as they are born. */
static int trace(pid_t worker) {
    int status;
    until(&s->ready);
    NEED(!ptrace(PTRACE_SEIZE, worker, 0, PTRACE_O_TRACEFORK) && !ptrace(PTRACE_INTERRUPT, worker, 0, 0));
    NEED(waitpid(worker, &status, 0) == worker && WIFSTOPPED(status));
    NEED(!ptrace(PTRACE_CONT, worker, 0, 0));
    s->traced = 1;
    for (;;) {
        pid_t p = waitpid(-1, &status, __WALL);
        NEED(p > 0);
        if (!WIFSTOPPED(status) && p == worker) return status;
        if (!WIFSTOPPED(status)) continue;
        int event = status >> 16, number = WSTOPSIG(status);
        if (p == worker) NEED(!ptrace(PTRACE_CONT, p, 0, event ? 0 : number));
        else if (s->spare) NEED(!ptrace(PTRACE_DETACH, p, 0, 0));
        else NEED(!kill(p, SIGKILL));
    }
}

int main(int argc, char **argv) {
    s = mmap(0, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    alarm(110);
    NEED(argc == 2);
    pid_t worker = fork();
    NEED(worker >= 0);
    if (!worker) prctl(PR_SET_PDEATHSIG, SIGKILL), work(atoi(argv[1]));
    return trace(worker) != 0;
}
