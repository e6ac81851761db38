/* What TCP_INQ says of the rest after a peer's end: one more than there is after a FIN, but not after the reset that the
 * kernel of a process sends which has ended with bytes unread.
 *
 *     hints ROUNDS
 *
 * Prints "result ok".
 */
#define _GNU_SOURCE
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "pairs.h"

enum { UNREAD = 2000, READ = 500, OWN = 1000, ESTABLISHED_STATE = 1 };
enum { KILLED, KILLED_WITH_UNREAD, SHUT, SHUT_AND_KILLED_WITH_UNREAD, ENDS };

static char buf[UNREAD];

static void peer(int b, int ends) {
    char c = 0;
    while (c != 'g') NEED(recv(b, &c, 1, 0) == 1 && (c == 'g' || send(b, &c, 1, 0) == 1));
    NEED(send(b, buf, UNREAD, 0) == UNREAD);
    if (ends >= SHUT) NEED(!shutdown(b, SHUT_WR));
    raise(SIGSTOP);
    _exit(0);
}

static int on_lane(int a) {
    char c;
    struct tcp_info before = info(a);
    NEED(send(a, "w", 1, 0) == 1 && recv(a, &c, 1, 0) == 1);
    struct tcp_info now = info(a);
    return now.tcpi_bytes_received == before.tcpi_bytes_received && now.tcpi_bytes_acked == before.tcpi_bytes_acked;
}

/* What it says with the first bytes. */
static int hint(int a) {
    char in[READ];
    long control[8];
    struct iovec v = {in, READ};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    NEED(recvmsg(a, &m, 0) == READ);
    struct cmsghdr *h = CMSG_FIRSTHDR(&m);
    NEED(h && h->cmsg_level == IPPROTO_TCP && h->cmsg_type == TCP_CM_INQ);
    return *(int *)CMSG_DATA(h);
}

static void ended(int ends) {
    int a, b, one = 1, status, own = ends == KILLED_WITH_UNREAD || ends == SHUT_AND_KILLED_WITH_UNREAD;
    dial(&a, &b);
    pid_t p = fork();
    NEED(p >= 0);
    if (!p) prctl(PR_SET_PDEATHSIG, SIGKILL), close(a), peer(b, ends);
    close(b);
    for (int k = 0; getenv("LD_PRELOAD") ? !on_lane(a) : k < 3; k++, sleep_us(500)) NEED(k < 20000);
    NEED(!setsockopt(a, IPPROTO_TCP, TCP_INQ, &one, sizeof one));
    NEED(send(a, "g", 1, 0) == 1 && waitpid(p, &status, WUNTRACED) == p && WIFSTOPPED(status));
    if (own) NEED(send(a, buf, OWN, MSG_NOSIGNAL) == OWN);
    if (ends != SHUT) NEED(!kill(p, SIGKILL) && waitpid(p, &status, 0) == p);
    for (int k = 0; info(a).tcpi_state == ESTABLISHED_STATE; k++, sleep_us(100)) NEED(k < 100000);
    int want = UNREAD - READ + (ends != KILLED_WITH_UNREAD), says = hint(a);
    if (says != want) fprintf(stderr, "end %d: %d, not %d\n", ends, says, want);
    NEED(says == want);
    close(a);
    if (ends == SHUT) NEED(!kill(p, SIGKILL) && waitpid(p, &status, 0) == p);
}

int main(int argc, char **argv) {
    NEED(argc == 2);
    alarm(110);
    for (int k = 0; k < atoi(argv[1]) * ENDS; k++) ended(k % ENDS);
    printf("result ok\n");
    return 0;
}
