/* A connection that is closed while the daemon reads the socket: the FIN comes at once all the same, so that a send
 * behind it finds EPIPE, and not the reset of a socket that was closed with unread bytes.
 *
 *     handed_in ROUNDS
 */
#define _GNU_SOURCE
#include "pairs.h"
#include <signal.h>

static long now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000L + t.tv_nsec;
}

int main(int argc, char **argv) {
    static char buf[1000];
    NEED(argc == 2);
    signal(SIGPIPE, SIG_IGN);
    for (int r = 0; r < atoi(argv[1]); r++) {
        int a, b;
        char got;
        dial(&a, &b);
        for (int m = 0; m < 1 + r % 4; m++) {
            NEED(send(a, "a", 1, 0) == 1 && recv(b, &got, 1, 0) == 1);
            NEED(send(b, "b", 1, 0) == 1 && recv(a, &got, 1, 0) == 1);
        }
        /* (The daemon needs about as long.) */
        for (long until = now_ns() + r * 997L % 300000; now_ns() < until;) {}
        close(b);
        NEED(send(a, buf, sizeof buf, 0) == sizeof buf);
        sleep_us(1000);
        NEED(send(a, buf, 1, 0) == -1 && errno == EPIPE);
        NEED(recv(a, &got, 1, 0) == 0);
        close(a);
    }
    puts("result ok");
}
