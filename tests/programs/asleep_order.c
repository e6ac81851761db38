/* What wakes a sleeper comes first: a connection and a pipe, in either order, and epoll_wait lists both.
 *
 *     asleep_order
 *
 * Both processes share a processor, and the sleeper gets it only when the other one does not want it: so it
 * wakes when both events are there. Prints "result ok".
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <signal.h>
#include <unistd.h>

#define FIRST 20
#define ROUNDS (FIRST + 400)
#define NEED(ok) \
    do { \
        if (!(ok)) { \
            fprintf(stderr, "FAILED line %d: %s (errno %d)\n", __LINE__, #ok, errno); \
            exit(1); \
        } \
    } while (0)

/* Answers each pair of bytes with the order in which it was told of them. */
static void sleeper(int listener, int pipe_end) {
    struct sched_param p = {0};
    NEED(!sched_setscheduler(0, SCHED_IDLE, &p));
    int fd = accept(listener, 0, 0), ep = epoll_create1(0);
    NEED(fd >= 0 && ep >= 0);
    struct epoll_event a = {EPOLLIN, {.u32 = 'l'}}, b = {EPOLLIN, {.u32 = 'p'}};
    NEED(!epoll_ctl(ep, EPOLL_CTL_ADD, fd, &a) && !epoll_ctl(ep, EPOLL_CTL_ADD, pipe_end, &b));
    char told[2], x;
    for (int n = 0;;) {
        struct epoll_event evs[4];
        int got = epoll_wait(ep, evs, 4, -1);
        NEED(got > 0);
        for (int k = 0; k < got; k++) {
            char what = (char)evs[k].data.u32;
            ssize_t r = read(what == 'l' ? fd : pipe_end, &x, 1);
            if (what == 'l' && r == 0) exit(0);
            NEED(r == 1);
            told[n++] = what;
            if (n == 2) {
                NEED(send(fd, told, 2, 0) == 2);
                n = 0;
            }
        }
    }
}

/* Whether it sleeps in epoll_wait: who sleeps in accept, or waits for the daemon's answer, finds both events
 * afterwards, and then nothing says which came first (proc(5), syscall: the call's number, or "running"). */
static int asleep(pid_t pid) {
    char path[64], line[512], *end;
    snprintf(path, sizeof path, "/proc/%d/syscall", pid);
    FILE *f = fopen(path, "r");
    NEED(f && fgets(line, sizeof line, f));
    fclose(f);
    long call = strtol(line, &end, 10);
    return end != line && (call == SYS_epoll_wait || call == SYS_epoll_pwait || call == SYS_epoll_pwait2);
}

int main(void) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof at;
    int listener = socket(AF_INET, SOCK_STREAM, 0), ends[2], on = 1, wrong = 0;
    NEED(!bind(listener, (void *)&at, len) && !listen(listener, 1));
    NEED(!getsockname(listener, (void *)&at, &len) && !pipe(ends));
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    NEED(!sched_setaffinity(0, sizeof one, &one));
    pid_t pid = fork();
    NEED(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        sleeper(listener, ends[0]);
    }
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    NEED(!connect(fd, (void *)&at, len));
    NEED(!setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on));
    for (int r = 0; r < ROUNDS; r++) {
        while (!asleep(pid)) usleep(1000);
        char want[2] = {'l', 'p'}, told[2];
        if (r % 2) want[0] = 'p', want[1] = 'l';
        for (int k = 0; k < 2; k++) {
            if (want[k] == 'l')
                NEED(send(fd, "x", 1, 0) == 1);
            else
                NEED(write(ends[1], "x", 1) == 1);
        }
        NEED(recv(fd, told, 2, MSG_WAITALL) == 2);
        /* While the connection is on its way to its lane, the daemon's message wakes the sleeper, which is then busy
         * when the events come, and finds both (docs/limits.md, "Events of two kinds"). */
        if (r >= FIRST && memcmp(want, told, 2)) {
            wrong++;
            fprintf(stderr, "round %d: %.2s, not %.2s\n", r, told, want);
        }
    }
    shutdown(fd, SHUT_WR);
    int status;
    NEED(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    NEED(wrong == 0);
    printf("result ok\n");
    return 0;
}
