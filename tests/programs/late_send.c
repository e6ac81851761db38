/* A large send to an end that has closed: the kernel takes as much of it as it would of another one, whatever comes back for
 * its first packet. The next send is told. With so many messages to and fro before.
 *
 *     late_send ROUNDS MESSAGES
 */
#define _GNU_SOURCE
#include "pairs.h"
#include <signal.h>

enum { LARGE = 100000 };
static char buf[LARGE];

int main(int argc, char **argv) {
    NEED(argc == 3);
    signal(SIGPIPE, SIG_IGN);
    for (int r = 0; r < atoi(argv[1]); r++) {
        int a, b;
        char got;
        dial(&a, &b);
        if (atoi(argv[2])) warm(a, b);
        for (int m = 0; m < atoi(argv[2]); m++) {
            NEED(send(a, "a", 1, 0) == 1 && recv(b, &got, 1, 0) == 1);
            NEED(send(b, "b", 1, 0) == 1 && recv(a, &got, 1, 0) == 1);
        }
        close(b);
        sleep_us(r % 3 * 5000);
        NEED(send(a, buf, LARGE, 0) == LARGE);
        sleep_us(5000);
        NEED(send(a, buf, 1, 0) == -1 && errno == EPIPE);
        NEED(recv(a, &got, 1, 0) == 0);
        close(a);
    }
    puts("result ok");
}
