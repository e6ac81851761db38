/* A vfork child has the descriptors of when it was made. Another thread makes an epoll set after that, and watches a
 * connection in it; then the child executes its program, so that the connection leaves its lane. The set goes on
 * telling of it.
 *
 *     late_exec
 *
 * Both ends are in this process. Prints "result ok".
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/wait.h>

#include "pairs.h"

static volatile int made, ready;

static void *executes(void *arg) {
    (void)arg;
    int status;
    pid_t child = vfork();
    if (!child) {
        made = 1;
        while (!ready) raw(SYS_sched_yield, 0, 0, 0, 0, 0);
        execl("/bin/true", "true", (char *)0);
        _exit(9);
    }
    NEED(waitpid(child, &status, 0) == child && status == 0);
    return 0;
}

int main(void) {
    alarm(60); /* an event that is lost */
    for (int k = 0; k < 5; k++) {
        int a, b;
        char c;
        pthread_t t;
        struct epoll_event e = {EPOLLIN, {.u32 = 7}}, got = {0};
        dial(&a, &b);
        warm(a, b);
        made = ready = 0;
        pthread_create(&t, 0, executes, 0);
        while (!made) sched_yield();
        int set = epoll_create1(0);
        NEED(!epoll_ctl(set, EPOLL_CTL_ADD, a, &e) && !epoll_wait(set, &got, 1, 0));
        ready = 1;
        pthread_join(t, 0);
        for (int n = 0; n < 3; n++) {
            NEED(send(b, "x", 1, 0) == 1);
            NEED(epoll_wait(set, &got, 1, 20000) == 1 && got.data.u32 == 7);
            NEED(recv(a, &c, 1, 0) == 1 && c == 'x');
        }
        NEED(epoll_wait(set, &got, 1, 0) == 0);
        close(a);
        NEED(close(b) == 0 && close(set) == 0);
    }
    printf("result ok\n");
    return 0;
}
