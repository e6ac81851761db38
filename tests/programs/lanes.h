/* For programs that look by themselves whether a connection is on a lane: then the kernel moves none of its bytes. */
#include <netinet/in.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

/* Bytes of `struct tcp_info`: what the other end has acknowledged, and what was received. */
struct moved {
    uint64_t acked, received;
};

static struct moved moved(int fd) {
    char info[256] = {0};
    socklen_t n = sizeof info;
    struct moved m;
    if (getsockopt(fd, IPPROTO_TCP, 11 /* TCP_INFO */, info, &n) || n < 136) abort();
    memcpy(&m, info + 120, sizeof m);
    return m;
}

/* Did neither direction move bytes on TCP since then? */
static int still(int fd, struct moved before) {
    struct moved now = moved(fd);
    return now.acked == before.acked && now.received == before.received;
}

static int under_shim(void) {
    const char *p = getenv("LD_PRELOAD");
    return p && strstr(p, "underpass");
}
