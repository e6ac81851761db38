/* System calls that no shim sees, and what the kernel says of a TCP socket: for C programs of the tests. */
#include <linux/tcp.h> /* its tcp_info is the longer one */
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

static inline long raw(long n, long a, long b, long c, long d, long f) {
#ifdef __x86_64__
    long got;
    register long r10 __asm__("r10") = d, r8 __asm__("r8") = f;
    __asm__ volatile("syscall" : "=a"(got) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8) : "rcx", "r11", "memory");
    return got;
#else
    return syscall(n, a, b, c, d, f);
#endif
}

static inline struct tcp_info info(int fd) {
    struct tcp_info i = {0};
    socklen_t n = sizeof i;
    raw(SYS_getsockopt, fd, IPPROTO_TCP, TCP_INFO, (long)&i, (long)&n);
    return i;
}
