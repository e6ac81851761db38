/* Children that share descriptors but not memory, or memory but not descriptors, or both without being a thread:
 * neither hears of what the other does to a number, and both go on.
 *
 *     clones files|memory|both name|number|number3
 */
#define _GNU_SOURCE
#include "pairs.h"
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#define ROUNDS 40
#define SLEEPERS 8
#define STACK (1 << 20)

/* Of both, whatever they share. */
static struct both {
    int fd, file;
} *both;
static int go[2], done[2];
static int kept[2]; /* a connection of which a child may have a copy */

static void step(int *pipe) {
    char x;
    NEED(read(pipe[0], &x, 1) == 1);
}

static void tell(int *pipe) {
    NEED(write(pipe[1], "x", 1) == 1);
}

/* With the descriptors in common, it closes connections, and puts files at their numbers; with its own ones, it
 * keeps them open. */
static int child(void *shared) {
    for (int k = 0; k < ROUNDS; k++) {
        step(go);
        if (shared) {
            if (k % 2) NEED(!close(both->fd));
            else NEED(dup2(both->file, both->fd) == both->fd);
        }
        tell(done);
    }
    if (!shared) {
        step(go);
        NEED(send(kept[0], "k", 1, 0) == 1);
    }
    _exit(0);
}

static void *sleeper(void *fd) {
    char x = 0;
    NEED(recv((int)(long)fd, &x, 1, 0) == 1 && x == 'z');
    return 0;
}

static pid_t start(const char *how, int flags, int shared) {
    char *stack = mmap(0, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    NEED(stack != MAP_FAILED);
    void *arg = (void *)(long)shared;
    if (!strcmp(how, "name")) return clone(child, stack + STACK, flags | SIGCHLD, arg);
    pid_t p;
    if (!strcmp(how, "number")) p = syscall(SYS_clone, flags | SIGCHLD, 0, 0, 0, 0);
    else {
        unsigned long args[11] = {[0] = flags, [4] = SIGCHLD};
        p = syscall(SYS_clone3, args, sizeof args);
    }
    if (!p) child(arg);
    return p;
}

int main(int argc, char **argv) {
    NEED(argc == 3);
    alarm(60); /* a thread or child that never ends */
    int files = strcmp(argv[1], "memory") != 0, memory = strcmp(argv[1], "files") != 0;
    both = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    NEED(both != MAP_FAILED && !pipe(go) && !pipe(done));
    NEED((both->file = memfd_create("file", 0)) >= 0);
    int a[SLEEPERS], b[SLEEPERS], c, d;
    pthread_t t[SLEEPERS];
    for (int k = 0; k < SLEEPERS; k++) {
        dial(&a[k], &b[k]);
        warm(a[k], b[k]);
        NEED(!pthread_create(&t[k], 0, sleeper, (void *)(long)b[k]));
    }
    dial(&kept[0], &kept[1]);
    warm(kept[0], kept[1]);
    sleep_us(20000);
    pid_t p = start(argv[2], (files ? CLONE_FILES : 0) | (memory ? CLONE_VM : 0), files);
    NEED(p > 0);
    int written = 0;
    for (int k = 0; k < ROUNDS; k++) {
        char x[2];
        dial(&c, &d);
        for (int n = 0; n < 20; n++) by_lane(c, d), by_lane(d, c);
        both->fd = c;
        tell(go);
        step(done);
        if (!files) NEED(!close(c)); /* the child of an earlier time has none of it */
        else if (k % 2) NEED(send(c, "y", 1, MSG_NOSIGNAL) == -1 && errno == EBADF);
        else {
            NEED(write(c, "file", 4) == 4);
            written += 4;
        }
        /* Nobody holds it any more, and nothing is unread: a clean end. */
        NEED(recv(d, x, 2, 0) == 0);
        NEED(!close(d));
        if (files && k % 2 == 0) NEED(!close(c));
    }
    NEED(lseek(both->file, 0, SEEK_END) == written);
    for (int k = 0; k < SLEEPERS; k++) NEED(send(a[k], "z", 1, 0) == 1 && !pthread_join(t[k], 0));
    int status;
    char x;
    NEED(!close(kept[0]));
    if (!files) {
        /* The child has its own. */
        NEED(recv(kept[1], &x, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN);
        tell(go);
        NEED(recv(kept[1], &x, 1, 0) == 1 && x == 'k');
    }
    NEED(recv(kept[1], &x, 1, 0) == 0);
    NEED(waitpid(p, &status, 0) == p && status == 0);
    puts("result ok");
}
