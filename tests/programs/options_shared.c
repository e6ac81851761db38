/* Keepalive and user time-out of a connection that a child holds as well, while the shim has its own in their place:
 * the child is told the application's, and when it takes the connection off its lane, or out of the family, the
 * socket has them again.
 *
 *     options_shared
 *
 * Both ends are in this process. Prints "result ok".
 */
#define _GNU_SOURCE
#include <signal.h>
#include <sys/wait.h>

#include "pairs.h"

#define TIMEOUT 30000

static int option(int fd, int level, int name) {
    int v = -1;
    socklen_t n = sizeof v;
    NEED(!getsockopt(fd, level, name, &v, &n));
    return v;
}

/* What the socket really has. */
static int hidden(int fd, int level, int name) {
    int v = -1;
    socklen_t n = sizeof v;
    NEED(!raw(SYS_getsockopt, fd, level, name, (long)&v, (long)&n));
    return v;
}

static int replaced(int fd) {
    return hidden(fd, SOL_SOCKET, SO_KEEPALIVE) && !hidden(fd, IPPROTO_TCP, TCP_USER_TIMEOUT);
}

int main(void) {
    int bare = !getenv("LD_PRELOAD");
    for (int how = 0; how < 2; how++) {
        int a, b, timeout = TIMEOUT, go[2], status;
        char c;
        dial(&a, &b);
        NEED(!setsockopt(a, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout, sizeof timeout));
        warm(a, b);
        NEED(!pipe(go));
        pid_t child = fork();
        if (!child) {
            close(go[1]);
            NEED(read(go[0], &c, 1) == 1);
            if (how == 0) { /* the next program has it */
                execl("/bin/true", "true", (char *)0);
                abort();
            }
            NEED(option(a, IPPROTO_TCP, TCP_USER_TIMEOUT) == TIMEOUT && !option(a, SOL_SOCKET, SO_KEEPALIVE));
            _exit(0);
        }
        for (int k = 0; k < 20000 && !bare && !replaced(a); k++) {
            by_lane(a, b);
            sleep_us(1000);
        }
        NEED(bare || replaced(a)); /* it was on its lane for a second, and is */
        NEED(write(go[1], "g", 1) == 1 && waitpid(child, &status, 0) == child && status == 0);
        NEED(hidden(a, IPPROTO_TCP, TCP_USER_TIMEOUT) == TIMEOUT && !hidden(a, SOL_SOCKET, SO_KEEPALIVE));
        by_lane(a, b);
        by_lane(b, a);
        close(a), close(b), close(go[0]), close(go[1]);
    }
    printf("result ok\n");
    return 0;
}
