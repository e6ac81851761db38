/* A ring of io_uring that gets other memory, where the kernel does that (6.13), and then registers a connection with
 * an epoll set, which has to report it. */
#define _GNU_SOURCE
#include "pairs.h"
#include <linux/io_uring.h>
#include <sys/epoll.h>
#include <sys/mman.h>

#define RESIZE_RINGS 33
#define NO_SQARRAY (1u << 16)

static struct io_uring_params p;
static char *memory;
static struct io_uring_sqe *requests;
static int ring;

static void map(void) {
    size_t all = p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe);
    int prot = PROT_READ | PROT_WRITE;
    memory = mmap(0, all, prot, MAP_SHARED, ring, IORING_OFF_SQ_RING);
    requests = mmap(0, p.sq_entries * sizeof *requests, prot, MAP_SHARED, ring, IORING_OFF_SQES);
    NEED(memory != MAP_FAILED && requests != MAP_FAILED);
}

static unsigned *word(unsigned offset) {
    return (unsigned *)(memory + offset);
}

static int ctl(int set, int op, int fd, struct epoll_event *ev) {
    unsigned tail = *word(p.sq_off.tail), at = tail & *word(p.sq_off.ring_mask);
    requests[at] = (struct io_uring_sqe){.opcode = IORING_OP_EPOLL_CTL, .fd = set, .len = op, .off = fd, .addr = (long)ev};
    __atomic_store_n(word(p.sq_off.tail), tail + 1, __ATOMIC_RELEASE);
    NEED(syscall(SYS_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, 0, 0) == 1);
    unsigned head = *word(p.cq_off.head);
    struct io_uring_cqe *done = (void *)(memory + p.cq_off.cqes);
    int said = done[head & *word(p.cq_off.ring_mask)].res;
    __atomic_store_n(word(p.cq_off.head), head + 1, __ATOMIC_RELEASE);
    return said;
}

int main(void) {
    int a, b, set = epoll_create1(0);
    char c;
    alarm(60); /* nothing is reported */
    dial(&a, &b);
    p.flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | NO_SQARRAY;
    ring = syscall(SYS_io_uring_setup, 4, &p);
    if (ring < 0) {
        NEED(errno == EPERM || errno == ENOSYS || errno == EINVAL); /* none here */
        warm(a, b);
        puts("result ok");
        return 0;
    }
    map();
    struct epoll_event ev = {EPOLLIN, {.u32 = 7}}, got;
    NEED(!ctl(set, EPOLL_CTL_ADD, b, &ev) && !ctl(set, EPOLL_CTL_DEL, b, &ev));
    struct io_uring_params larger = {.sq_entries = 32, .cq_entries = 64};
    if (!syscall(SYS_io_uring_register, ring, RESIZE_RINGS, &larger, 1)) {
        p.sq_entries = larger.sq_entries, p.cq_entries = larger.cq_entries;
        p.sq_off = larger.sq_off, p.cq_off = larger.cq_off;
        map();
    } else NEED(errno == EINVAL);
    warm(a, b);
    for (int k = 0; k < 100; k++) {
        NEED(!ctl(set, EPOLL_CTL_ADD, b, &ev));
        NEED(send(a, "x", 1, 0) == 1);
        NEED(epoll_wait(set, &got, 1, -1) == 1 && got.data.u32 == 7);
        NEED(recv(b, &c, 1, MSG_DONTWAIT) == 1);
        NEED(!ctl(set, EPOLL_CTL_DEL, b, &ev));
    }
    puts("result ok");
}
