/* Threads start programs, so connections leave their lanes, and the other ends of these are stopped: no daemon works either.
 *
 *     renumbered numbers DAEMON     the number by which the connection leaves is closed meanwhile, and is another's
 *     renumbered times DAEMON       each has its own time, whenever another thread began
 *
 * DAEMON: its process number, or 0. Prints "result ok".
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>

#include "pairs.h"

enum { AMOUNT = 2000 };

static pid_t daemon_pid;

static void tell_daemon(int signal) {
    if (daemon_pid) NEED(!kill(daemon_pid, signal));
}

/* The other end: echoes, or sends and stops. */
static void serve(void) {
    char what, bytes[AMOUNT];
    int s = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    NEED(!connect(s, (void *)&address, sizeof address));
    NEED(!setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one));
    for (int k = 0; k < AMOUNT; k++) bytes[k] = (char)k;
    while (recv(s, &what, 1, 0) == 1) {
        if (what == 'e') NEED(send(s, "w", 1, 0) == 1);
        if (what == 'f') NEED(send(s, bytes, AMOUNT, 0) == AMOUNT && !kill(getpid(), SIGSTOP));
    }
    _exit(0);
}

static void echo(int x) {
    char c;
    NEED(send(x, "e", 1, 0) == 1 && recv(x, &c, 1, 0) == 1 && c == 'w');
}

/* A connection on a lane, whose other end is another process, which has stopped: what it has sent is unread. */
static int left_waiting(pid_t *peer) {
    int status, bare = !getenv("LD_PRELOAD"), by_lane = 0;
    *peer = fork();
    NEED(*peer >= 0);
    if (!*peer) serve();
    int x = accept(listener, 0, 0);
    for (int k = 0; k < (bare ? 3 : 20000) && !by_lane; k++) {
        struct tcp_info was = info(x), is;
        echo(x);
        is = info(x);
        by_lane = was.tcpi_bytes_received == is.tcpi_bytes_received && was.tcpi_bytes_acked == is.tcpi_bytes_acked;
        sleep_us(1000);
    }
    NEED(bare || by_lane);
    NEED(send(x, "f", 1, 0) == 1);
    NEED(waitpid(*peer, &status, WUNTRACED) == *peer && WIFSTOPPED(status));
    return x;
}

static void take(int x) {
    char bytes[AMOUNT];
    NEED(recv(x, bytes, AMOUNT, MSG_WAITALL) == AMOUNT);
    for (int k = 0; k < AMOUNT; k++) NEED(bytes[k] == (char)k);
    echo(x);
}

static void *starts(void *arg) {
    NEED(system("true") == 0);
    return arg;
}

static void numbers(void) {
    pid_t peer;
    pthread_t thread;
    int a, b, x = left_waiting(&peer), copy = dup(x);
    NEED(copy > x);
    tell_daemon(SIGSTOP);
    NEED(!pthread_create(&thread, 0, starts, 0));
    sleep_us(100000);
    NEED(!close(copy));
    dial(&a, &b);
    NEED(a == copy);
    by_lane(a, b);
    NEED(!pthread_join(thread, 0)); /* `x` has had more time than it gets, and may be reset */
    tell_daemon(SIGCONT);
    by_lane(a, b);
    by_lane(b, a);
    NEED(!kill(peer, SIGKILL) && waitpid(peer, 0, 0) == peer);
    close(x);
}

static void times(void) {
    pid_t slow, peer;
    pthread_t first, second;
    int x = left_waiting(&slow), y = left_waiting(&peer);
    NEED(!fcntl(y, F_SETFD, FD_CLOEXEC));
    tell_daemon(SIGSTOP);
    NEED(!pthread_create(&first, 0, starts, 0));
    sleep_us(1600000);
    NEED(!fcntl(y, F_SETFD, 0));
    NEED(!pthread_create(&second, 0, starts, 0));
    sleep_us(900000); /* more than `x` has left, which may be reset */
    NEED(!kill(peer, SIGCONT));
    NEED(!pthread_join(first, 0) && !pthread_join(second, 0));
    tell_daemon(SIGCONT);
    take(y);
    close(y);
    NEED(waitpid(peer, 0, 0) == peer);
    NEED(!kill(slow, SIGKILL) && waitpid(slow, 0, 0) == slow);
    close(x);
}

int main(int argc, char **argv) {
    int a, b;
    NEED(argc == 3);
    daemon_pid = atoi(argv[2]);
    dial(&a, &b); /* (for the listener) */
    close(a), close(b);
    NEED(!fcntl(listener, F_SETFD, FD_CLOEXEC));
    if (!strcmp(argv[1], "numbers")) numbers();
    else times();
    puts("result ok");
}
