/* A program whose connection the shim has to reset, because it leaves its lane with bytes unread that the other end, which is
 * stopped, does not bring to TCP, and neither does the daemon, which is stopped, too. What was on a lane before stays
 * there; what is new stays on TCP until an operator has seen it, also in a child. Bytes behind the shim's back, which any
 * peer can send, reset a connection as well, and change nothing else.
 *
 *     fuse GO FROZEN
 *
 * Prints "unread", waits for the file FROZEN, prints "lost", and waits until that file is gone; prints "tcp", goes on with
 * new connections on TCP until the file GO exists, and then, on lanes again, "result ok".
 */
#define _GNU_SOURCE
#include "pairs.h"
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static void both(int a, int b) {
    by_lane(a, b);
    by_lane(b, a);
    sleep_us(1000);
}

/* A process that answers each byte until one says that it is to send much and stop. */
static pid_t answerer(void) {
    static char much[50000];
    char c;
    pid_t pid = fork();
    NEED(pid >= 0);
    if (pid) return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    NEED(!connect(fd, (void *)&address, sizeof address));
    while (recv(fd, &c, 1, 0) == 1 && c != 's') NEED(send(fd, &c, 1, 0) == 1);
    NEED(send(fd, much, sizeof much, MSG_DONTWAIT) == sizeof much);
    raise(SIGSTOP);
    _exit(0);
}

/* The connection to an answerer that is stopped, on its lane, with what that one has sent. */
static int stopped(pid_t pid) {
    int fd = accept(listener, 0, 0), status, lane = 0;
    char c;
    NEED(fd >= 0);
    for (int k = 0; k < 20000 && lane < 3; k++) {
        unsigned long before = info(fd).tcpi_bytes_received;
        NEED(send(fd, "x", 1, 0) == 1 && recv(fd, &c, 1, 0) == 1);
        lane += info(fd).tcpi_bytes_received == before;
        sleep_us(1000);
    }
    NEED(lane == 3 && send(fd, "s", 1, 0) == 1);
    NEED(waitpid(pid, &status, WUNTRACED) == pid && WIFSTOPPED(status));
    return fd;
}

static void say(const char *what) {
    puts(what);
    fflush(stdout);
}

int main(int argc, char **argv) {
    NEED(argc == 3);
    int kept[2], lost[2], next[2], status;
    char c[16];
    dial(&kept[0], &kept[1]);
    warm(kept[0], kept[1]);
    dial(&lost[0], &lost[1]);
    warm(lost[0], lost[1]);
    NEED(raw(SYS_write, lost[0], (long)"foreign", 7, 0, 0) == 7);
    NEED(recv(lost[1], c, sizeof c, 0) == -1 && errno == ECONNRESET);
    close(lost[0]), close(lost[1]);
    dial(&next[0], &next[1]);
    warm(next[0], next[1]);
    close(next[0]), close(next[1]);

    pid_t other = answerer();
    int leaves = stopped(other);
    say("unread");
    while (access(argv[2], F_OK)) sleep_us(1000);
    NEED(dup2(leaves, 0) == 0);
    NEED(recv(leaves, c, sizeof c, 0) == -1 && errno == ECONNRESET);
    say("lost");
    while (!access(argv[2], F_OK)) sleep_us(1000);
    close(leaves), close(0);
    dial(&next[0], &next[1]);
    for (int k = 0; k < 1000; k++) both(next[0], next[1]);
    NEED(by_lane(kept[0], kept[1]) && by_lane(kept[1], kept[0]));
    NEED(!by_lane(next[0], next[1]) && !by_lane(next[1], next[0]));
    pid_t child = fork(); /* it has no connection of its own until an operator has seen it */
    NEED(child >= 0);
    if (!child) {
        for (int k = 0; k < 2; k++) close(kept[k]), close(next[k]);
        while (access(argv[1], F_OK)) sleep_us(1000);
        listener = -1, address.sin_port = 0;
        dial(&lost[0], &lost[1]);
        warm(lost[0], lost[1]);
        _exit(0);
    }
    say("tcp");
    while (access(argv[1], F_OK)) both(next[0], next[1]);
    warm(next[0], next[1]);
    dial(&lost[0], &lost[1]);
    warm(lost[0], lost[1]);
    NEED(waitpid(child, &status, 0) == child && status == 0);
    kill(other, SIGKILL);
    puts("result ok");
}
