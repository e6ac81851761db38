/* Calls with flags that TCP ignores, and reads and writes at no offset, leave a connection on its lane; those at an
 * offset are refused.
 *
 *     ignored
 *
 * Prints "result ok".
 */
#define _GNU_SOURCE
#include <sys/uio.h>

#include "pairs.h"

static int a, b;

static void on_lane(void) {
    NEED(by_lane(a, b) || !getenv("LD_PRELOAD"));
    NEED(by_lane(b, a) || !getenv("LD_PRELOAD"));
}

static void sends(int flags) {
    char s[20] = "0123456789", t[20] = {0};
    struct iovec v = {s, 10};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1};
    struct mmsghdr mm = {.msg_hdr = m};
    NEED(send(a, s, 10, flags) == 10 && recv(b, t, 20, 0) == 10 && !memcmp(s, t, 10));
    NEED(sendto(a, s, 10, flags, NULL, 0) == 10 && recv(b, t, 20, 0) == 10 && !memcmp(s, t, 10));
    NEED(sendmsg(a, &m, flags) == 10 && recv(b, t, 20, 0) == 10);
    NEED(sendmmsg(a, &mm, 1, flags) == 1 && mm.msg_len == 10 && recv(b, t, 20, 0) == 10);
    on_lane();
}

static void receives(int flags) {
    char s[20] = "0123456789", t[20] = {0};
    struct iovec v = {t, 20};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1};
    NEED(send(a, s, 10, 0) == 10 && recv(b, t, 20, flags) == 10 && !memcmp(s, t, 10));
    NEED(send(a, s, 10, 0) == 10 && recvfrom(b, t, 20, flags, NULL, NULL) == 10);
    NEED(send(a, s, 10, 0) == 10 && recvmsg(b, &m, flags) == 10 && !m.msg_flags);
    NEED(recv(b, t, 20, flags | MSG_DONTWAIT) == -1 && errno == EAGAIN);
    on_lane();
}

static void offsets(void) {
    char s[20] = "0123456789", t[20] = {0};
    struct iovec v[2] = {{s, 4}, {s + 4, 6}}, w[2] = {{t, 6}, {t + 6, 14}};
    NEED(pwritev2(a, v, 2, -1, 0) == 10 && preadv2(b, w, 2, -1, 0) == 10 && !memcmp(s, t, 10));
    on_lane();
    NEED(preadv2(b, w, 0, -1, 0) == 0 && pwritev2(a, v, 0, -1, 0) == 0);
    NEED(preadv2(b, w, 2, 0, 0) == -1 && errno == ESPIPE);
    NEED(pwritev2(a, v, 2, 5, 0) == -1 && errno == ESPIPE);
    NEED(preadv2(b, w, 2, -2, 0) == -1 && errno == EINVAL);
    NEED(pwritev2(a, v, 2, -2, 0) == -1 && errno == EINVAL);
    on_lane();
}

int main(void) {
    alarm(100);
    dial(&a, &b);
    warm(a, b);
    offsets();
    const int out[] = {MSG_PEEK, MSG_DONTROUTE, MSG_CTRUNC, MSG_TRUNC, MSG_WAITALL, MSG_FIN, MSG_SYN, MSG_RST, MSG_ERRQUEUE,
                       MSG_WAITFORONE, MSG_WAITALL | MSG_DONTROUTE | MSG_NOSIGNAL};
    for (size_t k = 0; k < sizeof out / sizeof *out; k++) sends(out[k]);
    const int in[] = {MSG_DONTROUTE, MSG_CTRUNC, MSG_PROXY, MSG_EOR, MSG_FIN, MSG_SYN, MSG_CONFIRM, MSG_RST, MSG_MORE,
                      MSG_WAITFORONE, MSG_BATCH, MSG_ZEROCOPY, MSG_FASTOPEN, MSG_CONFIRM | MSG_NOSIGNAL};
    for (size_t k = 0; k < sizeof in / sizeof *in; k++) receives(in[k]);
    close(a), close(b);
    printf("result ok\n");
    return 0;
}
