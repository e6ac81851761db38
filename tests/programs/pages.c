/* Memory that was good in an earlier call, and that is taken away: EFAULT, not a signal.
 *
 *     pages
 *
 * Prints "result ok".
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/shm.h>
#include <sys/uio.h>
#include <sys/wait.h>

#include "pairs.h"

#define PAGE 4096
static int a, b;

static void drain(void) {
    static char sink[1 << 16];
    while (recv(b, sink, sizeof sink, MSG_DONTWAIT) > 0) {}
}

/* As a program that goes on with its work for a while. */
static void work(void) {
    struct timespec from, now;
    char c = 'w';
    clock_gettime(CLOCK_MONOTONIC, &from);
    do {
        NEED(send(a, &c, 1, 0) == 1 && recv(b, &c, 1, 0) == 1);
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while ((now.tv_sec - from.tv_sec) * 1000 + (now.tv_nsec - from.tv_nsec) / 1000000 < 60);
}

static void good(char *p) {
    NEED(send(a, p, 100, 0) == 100 && recv(b, p, 100, 0) == 100);
    struct iovec v = {p, 10};
    NEED(writev(a, &v, 1) == 10);
    drain();
}

#define FAULTS(call) NEED((errno = 0, (call) == -1) && errno == EFAULT)

static void bad(char *p) {
    FAULTS(send(a, p, 100, 0));
    FAULTS(write(a, p + 50, 1));
    struct iovec v = {p, 10};
    FAULTS(writev(a, &v, 1));
    NEED(send(b, "x", 1, 0) == 1);
    FAULTS(recv(a, p, 1, 0));
    NEED(recv(a, (char[1]){0}, 1, 0) == 1);
    struct pollfd *f = (void *)p;
    FAULTS(poll(f, 1, 0));
    char c;
    NEED(send(a, "y", 1, 0) == 1 && recv(b, &c, 1, 0) == 1 && c == 'y');
}

static char *map(int prot, int flags, int fd) {
    char *p = mmap(0, 4 * PAGE, prot, flags, fd, 0);
    NEED(p != MAP_FAILED);
    return p;
}
#define RW (PROT_READ | PROT_WRITE)
#define ANON (MAP_PRIVATE | MAP_ANONYMOUS)

/* Through the C library: at once. */
static void by_name(void) {
    char *p = map(RW, ANON, -1);
    good(p), NEED(!munmap(p, 4 * PAGE)), bad(p);
    p = map(RW, ANON, -1);
    good(p), NEED(!mprotect(p, 4 * PAGE, PROT_NONE)), bad(p);
    p = map(RW, ANON, -1);
    good(p), NEED(!pkey_mprotect(p, 4 * PAGE, PROT_NONE, -1)), bad(p);
    int id = shmget(IPC_PRIVATE, 4 * PAGE, 0600);
    p = shmat(id, 0, 0);
    NEED(id >= 0 && p != (void *)-1 && !shmctl(id, IPC_RMID, 0));
    good(p), NEED(!shmdt(p)), bad(p);
}

/* Unseen: when the program has gone on for a while. */
static void unseen(void) {
    char *p = map(RW, ANON, -1);
    good(p), NEED(!raw(SYS_munmap, (long)p, 4 * PAGE, 0, 0, 0)), work(), bad(p);
    p = map(RW, ANON, -1);
    good(p);
    NEED(mmap(p, 4 * PAGE, PROT_NONE, ANON | MAP_FIXED, -1, 0) == p);
    work(), bad(p);
    p = malloc(1 << 20);
    good(p + 8 * PAGE), free(p), work(), bad(p + 8 * PAGE);
    int file = memfd_create("file", 0); /* truncated by another process */
    NEED(file >= 0 && !ftruncate(file, 4 * PAGE));
    p = map(RW, MAP_SHARED, file);
    good(p + PAGE);
    pid_t child = fork();
    if (!child) _exit(ftruncate(file, 0) != 0);
    int status;
    NEED(waitpid(child, &status, 0) == child && !status);
    warm(a, b), work(), bad(p + PAGE);
}

static char frozen[PAGE] __attribute__((aligned(PAGE)));

/* Arrays of a wait that may not be written: the kernel waits, and then says so. */
static void constant(void) {
    struct pollfd *f = (void *)frozen;
    fd_set *s = (void *)(frozen + 1024);
    f->fd = a, f->events = POLLIN;
    FD_SET(a, s);
    NEED(!mprotect(frozen, PAGE, PROT_READ));
    struct timespec from, to;
    for (int k = 0; k < 4; k++) {
        if (k >= 2) NEED(send(b, "x", 1, 0) == 1);
        clock_gettime(CLOCK_MONOTONIC, &from);
        struct timeval t = {0, 50000};
        if (k % 2) FAULTS(poll(f, 1, 50));
        else FAULTS(select(a + 1, s, 0, 0, &t));
        clock_gettime(CLOCK_MONOTONIC, &to);
        long ms = (to.tv_sec - from.tv_sec) * 1000 + (to.tv_nsec - from.tv_nsec) / 1000000;
        if (k < 2) NEED(ms >= 49); /* it has waited */
    }
    struct timeval t = {0, 0};
    NEED(f->revents == 0 && FD_ISSET(a, s));
    fd_set again;
    FD_ZERO(&again);
    FD_SET(a, &again);
    NEED(select(a + 1, &again, 0, 0, &t) == 1);
    NEED(recv(a, (char[2]){0}, 2, MSG_WAITALL) == 2);
}

/* A send whose buffer goes bad behind so much: the kernel takes 32 KiB at a time, and what it has taken is sent. */
static void half(long size) {
    static char sink[1 << 18];
    long pages = (size + PAGE - 1) / PAGE, got = 0, r;
    char *p = mmap(0, (pages + 1) * PAGE, RW, ANON, -1, 0);
    NEED(p != MAP_FAILED && !mprotect(p + pages * PAGE, PAGE, PROT_NONE));
    for (long k = 0; k < pages * PAGE; k++) p[k] = k % 251;
    char *from = p + pages * PAGE - size;
    long n = send(a, from, size + 100, 0);
    if (size < 20000) NEED(n == -1 && errno == EFAULT);
    else NEED(n > size - (40 << 10) && n > 0 && n <= size);
    while (got < n && (r = recv(b, sink + got, n - got, 0)) > 0) got += r;
    NEED(n < 0 || (got == n && !memcmp(sink, from, n)));
    NEED(recv(b, sink, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN && !munmap(p, (pages + 1) * PAGE));
}

int main(void) {
    alarm(100);
    dial(&a, &b);
    warm(a, b);
    for (int k = 0; k < 5; k++) half((long[]){100, 10000, 50000, 65536, 200000}[k]);
    by_name();
    warm(a, b);
    unseen();
    constant();
    warm(a, b);
    printf("result ok\n");
    return 0;
}
