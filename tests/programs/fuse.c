/* A program whose connection the shim has to reset, because bytes that no hooked call has sent are on TCP below the
 * lane. What was on a lane before stays there; what is new stays on TCP until an operator has seen it,
 * also in a child.
 *
 *     fuse GO
 *
 * Prints "tcp", goes on with new connections on TCP until the file GO exists, and then, on lanes again, "result ok".
 */
#define _GNU_SOURCE
#include "pairs.h"
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static void both(int a, int b) {
    by_lane(a, b);
    by_lane(b, a);
    sleep_us(1000);
}

int main(int argc, char **argv) {
    NEED(argc == 2);
    int kept[2], lost[2], next[2];
    char c[16];
    dial(&kept[0], &kept[1]);
    dial(&lost[0], &lost[1]);
    warm(kept[0], kept[1]);
    warm(lost[0], lost[1]);
    NEED(raw(SYS_write, lost[0], (long)"foreign", 7, 0, 0) == 7);
    ssize_t got = recv(lost[1], c, sizeof c, 0);
    NEED(got == -1 && errno == ECONNRESET);
    dial(&next[0], &next[1]);
    for (int k = 0; k < 1000; k++) both(next[0], next[1]);
    NEED(by_lane(kept[0], kept[1]) && by_lane(kept[1], kept[0]));
    NEED(!by_lane(next[0], next[1]) && !by_lane(next[1], next[0]));
    pid_t child = fork(); /* it has no connection of its own until an operator has seen it */
    NEED(child >= 0);
    if (!child) {
        for (int k = 0; k < 2; k++) close(kept[k]), close(lost[k]), close(next[k]);
        while (access(argv[1], F_OK)) sleep_us(1000);
        listener = -1, address.sin_port = 0;
        dial(&lost[0], &lost[1]);
        warm(lost[0], lost[1]);
        _exit(0);
    }
    puts("tcp");
    fflush(stdout);
    while (access(argv[1], F_OK)) both(next[0], next[1]);
    warm(next[0], next[1]);
    dial(&lost[0], &lost[1]);
    warm(lost[0], lost[1]);
    int status;
    NEED(waitpid(child, &status, 0) == child && status == 0);
    puts("result ok");
}
