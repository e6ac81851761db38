/* Calls by number with pointers that are no good: what the kernel would read, it is to refuse. The connection keeps
 * its lane. */
#define _GNU_SOURCE
#include "pairs.h"
#include <linux/io_uring.h>
#include <signal.h>
#include <sys/mman.h>

#define REFUSED(error, ...) NEED((errno = 0, syscall(__VA_ARGS__)) == -1 && errno == (error))

/* The last bytes that can be read; and none. */
static char *edge, *bad = (char *)4096;

static void rings(void) {
    struct io_uring_params p = {0};
    int ring = syscall(SYS_io_uring_setup, 8, &p);
    if (ring < 0 && (errno == EPERM || errno == ENOSYS)) return; /* none for this program */
    NEED(ring >= 0);
    int *list = (int *)(edge - 4);
    *list = -1;
    struct io_uring_rsrc_register two = {.nr = 2, .data = (unsigned long)list};
    REFUSED(EFAULT, SYS_io_uring_register, ring, IORING_REGISTER_FILES, bad, 2);
    REFUSED(EFAULT, SYS_io_uring_register, ring, IORING_REGISTER_FILES, list, 2);
    REFUSED(EFAULT, SYS_io_uring_register, ring, IORING_REGISTER_FILES2, bad, sizeof two);
    REFUSED(EFAULT, SYS_io_uring_register, ring, IORING_REGISTER_FILES2, &two, sizeof two);
    REFUSED(EFAULT, SYS_io_uring_register, ring, IORING_REGISTER_FILES_UPDATE, bad, 1);
    /* (It does not look at the pointer before the size.) */
    REFUSED(EINVAL, SYS_io_uring_register, ring, IORING_REGISTER_FILES_UPDATE2, bad, 1);
    REFUSED(EFAULT, SYS_io_uring_register, ring, IORING_REGISTER_PROBE, bad, 1);
    NEED(!close(ring));
}

static void children(void) {
    REFUSED(EFAULT, SYS_clone3, bad, 88);
    REFUSED(EFAULT, SYS_clone3, edge - 8, 88);
}

static void handlers(void) {
    unsigned long action[4] = {0}, before[4];
    REFUSED(EFAULT, SYS_rt_sigaction, SIGUSR1, bad, 0, 8);
    REFUSED(EFAULT, SYS_rt_sigaction, SIGUSR1, edge - 8, 0, 8);
    REFUSED(EFAULT, SYS_rt_sigaction, SIGUSR1, 0, bad, 8);
    /* What comes before is done. */
    action[0] = (unsigned long)SIG_IGN;
    REFUSED(EFAULT, SYS_rt_sigaction, SIGUSR1, action, bad, 8);
    NEED(!syscall(SYS_rt_sigaction, SIGUSR1, 0, before, 8) && before[0] == action[0]);
}

/* Descriptors in a message: a length beyond its end. */
static void rights(void) {
    int pair[2];
    NEED(!socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
    for (size_t len = 1 << 20; len; len <<= 8) {
        struct cmsghdr *c = (void *)(edge - CMSG_SPACE(4));
        *c = (struct cmsghdr){.cmsg_len = len, .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
        struct iovec v = {"x", 1};
        struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = c, .msg_controllen = CMSG_SPACE(4)};
        ssize_t sent = sendmsg(pair[0], &m, 0);
        NEED(sent == -1 && errno == EINVAL);
    }
}

int main(void) {
    int a, b;
    edge = mmap(0, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    NEED(edge != MAP_FAILED && !mprotect(edge + 4096, 4096, PROT_NONE));
    edge += 4096;
    dial(&a, &b);
    warm(a, b);
    rings();
    children();
    handlers();
    rights();
    NEED(by_lane(a, b) || !getenv("LD_PRELOAD"));
    puts("result ok");
}
