/* Threads, each of which again and again has both ends of a connection in this process, on a lane or on its way there,
 * perhaps with bytes unread, and forks a child whose child goes on with one end, perhaps as another program, with or without
 * the shim. All the time, others fork, spawn, and call system().
 *
 *     grandchildren THREADS SECONDS
 *
 * Prints "rounds N lanes N" and "result ok".
 */
#define _GNU_SOURCE
#include "pairs.h"
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>

enum { MOST = 2500, PINGS = 20 };
enum { SYSTEM_BEFORE, SPAWN_BEFORE, EXEC, EXEC_BARE, SYSTEM_AFTER, WAYS };

static long until;
static int rounds, lanes;

static long now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static void echo(int b) {
    char buf[3000];
    for (long k; (k = recv(b, buf, sizeof buf, 0)); ) {
        NEED(k > 0);
        for (long at = 0, r; at < k; at += r) NEED((r = send(b, buf + at, (size_t)(k - at), MSG_NOSIGNAL)) > 0);
    }
}

static void ping(int a, unsigned *seed) {
    char out[MOST], in[MOST];
    for (int k = 0; k < PINGS; k++) {
        int n = 1 + rand_r(seed) % MOST;
        memset(out, k, (size_t)n);
        NEED(send(a, out, (size_t)n, MSG_NOSIGNAL) == n);
        NEED(recv(a, in, (size_t)n, MSG_WAITALL) == n && !memcmp(in, out, (size_t)n));
    }
}

/* `late`: this process closes its own copy of `b` when the child has ended. */
static void fork_twice(int a, int b, int how, int late) {
    int status;
    char of[12];
    pid_t child = fork();
    NEED(child >= 0);
    if (child) {
        if (!late) close(b);
        NEED(waitpid(child, &status, 0) == child && status == 0);
        if (late) close(b);
        return;
    }
    pid_t grandchild = fork();
    if (grandchild) _exit(grandchild < 0);
    close(a);
    sprintf(of, "%d", b);
    if (how == EXEC_BARE) unsetenv("LD_PRELOAD");
    if (how == EXEC || how == EXEC_BARE) execl("/proc/self/exe", "grandchildren", of, (char *)0);
    echo(b);
    _exit(0);
}

static void round_of(unsigned *seed) {
    int a, b, how = (int)(rand_r(seed) % WAYS), tries = (int)(rand_r(seed) % 60), unread = rand_r(seed) % 3 ? 0 : (int)(rand_r(seed) % 2000);
    char c, *argv[] = {"true", 0}, bytes[2000] = {0};
    pid_t pid;
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&lock);
    dial(&a, &b);
    pthread_mutex_unlock(&lock);
    for (int k = 0; k < tries; k++, sleep_us(500))
        if (by_lane(a, b) && by_lane(b, a)) {
            __sync_fetch_and_add(&lanes, 1);
            break;
        }
    if (unread) NEED(send(a, bytes, (size_t)unread, 0) == unread);
    if (how == SYSTEM_BEFORE) NEED(system("true") == 0);
    if (how == SPAWN_BEFORE) NEED(!posix_spawn(&pid, "/bin/true", 0, 0, argv, environ) && waitpid(pid, 0, 0) == pid);
    fork_twice(a, b, how, rand_r(seed) % 2);
    if (how == SYSTEM_AFTER) NEED(system("true") == 0);
    if (unread) NEED(recv(a, bytes, (size_t)unread, MSG_WAITALL) == unread);
    ping(a, seed);
    NEED(!shutdown(a, SHUT_WR) && recv(a, &c, 1, 0) == 0); /* (others' children have copies: a close would not do) */
    close(a);
    __sync_fetch_and_add(&rounds, 1);
}

static void *thread(void *of) {
    unsigned seed = (unsigned)(long)of;
    while (now_ms() < until) round_of(&seed);
    return 0;
}

int main(int argc, char **argv) {
    signal(SIGPIPE, SIG_IGN);
    if (argc == 2) return echo(atoi(argv[1])), 0;
    pthread_t threads[64];
    int n = argc == 3 ? atoi(argv[1]) : 0;
    NEED(n > 0 && n <= 64);
    until = now_ms() + 1000 * atol(argv[2]);
    for (long k = 0; k < n; k++) NEED(!pthread_create(&threads[k], 0, thread, (void *)(k * 7919 + getpid())));
    for (int k = 0; k < n; k++) pthread_join(threads[k], 0);
    printf("rounds %d lanes %d\nresult ok\n", rounds, lanes);
}
