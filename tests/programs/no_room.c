/* A library, preloaded into a daemon that may not make a socket's send buffer larger than it is: where it has a direction
 * to bring to TCP, and TCP is full, it has to wait. */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

int setsockopt(int fd, int level, int name, const void *value, socklen_t len) {
    if (level == SOL_SOCKET && (name == SO_SNDBUF || name == SO_SNDBUFFORCE)) {
        errno = EPERM;
        return -1;
    }
    return (int)syscall(SYS_setsockopt, fd, level, name, value, len);
}
