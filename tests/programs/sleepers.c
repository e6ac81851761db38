/* Calls that sleep on a connection, and what happens to it meanwhile: what they say, when, and what is found after.
 *
 *     sleepers OUT WAIT_MS PART PARTS CALLS  every PARTS-th case of the first CALLS calls
 *     sleepers OUT WAIT_MS CASE...           those; a case is CALL * 100 + EVENT, plus 100000
 *
 * One line for each case, the same bare and on lanes. The other end is a process of its own. A call that the event
 * does not end is ended by what the other end sends, reads or closes; WAIT_MS says how long it is given before.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "other.h"

#define CASE 100000

/* ---- the calls ---- */

static int call, pipes[2];

enum { RECV0, RECV, WAITALL_PART, PEEK, RECVMMSG, SEND, POLLIN_, POLL0, EPOLL, /* and what is much the same */ WAITALL, PEEKALL, READ,
       RECVMSG0, TIMED, LOWAT, SPLICE, SEND_TIMED, WRITEV, POLLOUT_, POLLRDHUP_, SELECT, EPOLLET_, CALLS };
static const char *const calls[] = {"recv0", "recv", "waitall part", "peek", "recvmmsg", "send", "POLLIN", "POLL 0", "epoll", "waitall",
                                    "peek all", "read", "recvmsg0", "timed", "lowat", "splice", "send timed", "writev", "POLLOUT",
                                    "POLLRDHUP", "select", "epoll et"};

static int fills(int which) {
    return which == SEND || which == SEND_TIMED || which == WRITEV || which == POLLOUT_;
}

static void prepare(void) {
    struct timeval t = {20, 0};
    int low = 10;
    if (call == TIMED) NEED(!setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t));
    if (call == SEND_TIMED) NEED(!setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &t, sizeof t));
    if (call == LOWAT) NEED(!setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &low, sizeof low));
    if (call == WAITALL_PART || call == PEEKALL) tell('1'), until_there(fd, 1);
    if (call == POLLOUT_)
        for (int k = 0; k < 100; k++) {
            if (send(fd, large, FULL, MSG_DONTWAIT) < 0) sleep_us(1000);
        }
}

static long polled(int events) {
    struct pollfd p = {fd, (short)events, 0};
    int n = poll(&p, 1, 20000);
    return n == 1 ? p.revents : -n;
}

static long made(void) {
    struct iovec v = {got, 0}, w[2] = {{large, FULL / 2}, {large, FULL / 2}};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1};
    struct mmsghdr mm[3] = {0};
    struct epoll_event ev = {EPOLLIN | EPOLLRDHUP | (call == EPOLLET_ ? EPOLLET : 0), {0}};
    fd_set in;
    long r;
    switch (call) {
    case RECV0: return recv(fd, got, 0, 0);
    case RECV: return recv(fd, got, 100, 0);
    case WAITALL: case WAITALL_PART: return recv(fd, got, 100, MSG_WAITALL);
    case PEEK: return recv(fd, got, 100, MSG_PEEK);
    case PEEKALL: return recv(fd, got, 100, MSG_PEEK | MSG_WAITALL);
    case READ: return read(fd, got, 100);
    case RECVMSG0: return recvmsg(fd, &m, 0);
    case RECVMMSG:
        for (int k = 0; k < 3; k++) mm[k].msg_hdr = (struct msghdr){.msg_iov = &v, .msg_iovlen = 1};
        v.iov_len = 1;
        return recvmmsg(fd, mm, 3, 0, NULL);
    case TIMED: case LOWAT: return recv(fd, got, 100, 0);
    case SPLICE: return splice(fd, NULL, pipes[1], NULL, 100, 0);
    case SEND: case SEND_TIMED: return send(fd, large, FULL, MSG_NOSIGNAL);
    case WRITEV: return writev(fd, w, 2);
    case POLLIN_: return polled(POLLIN);
    case POLLOUT_: return polled(POLLOUT);
    case POLL0: return polled(0);
    case POLLRDHUP_: return polled(POLLRDHUP);
    case SELECT:
        FD_ZERO(&in);
        FD_SET(fd, &in);
        return select(fd + 1, &in, NULL, NULL, &(struct timeval){20, 0});
    default: {
        int set = epoll_create1(0);
        NEED(!epoll_ctl(set, EPOLL_CTL_ADD, fd, &ev));
        ev.events = 0;
        r = epoll_wait(set, &ev, 1, 20000);
        close(set);
        return r == 1 ? ev.events : -r;
    }
    }
}

/* ---- the events ---- */

enum { SHUT_WR_, SHUT_RD_, SHUT_BOTH, PEER_WR, PEER_RD, PEER_BOTH, PEER_CLOSE, PEER_LINGER, PEER_UNSPEC, UNSPEC, ONE, MANY, OOB, ZERO,
       NODELAY, NONBLOCK, TIMEO, SO_ERROR_, EXIT, KILL, EXIT_UNREAD, KILL_UNREAD, CLOSE_UNREAD, SEND_OWN, SIGNALLED, RESTARTED, ALL, IN_HANDLER,
       EVENTS = IN_HANDLER + 6 };
static const char *const events[] = {"SHUT_WR", "SHUT_RD", "SHUT_RDWR", "peer SHUT_WR", "peer SHUT_RD", "peer SHUT_RDWR", "peer close",
                                     "peer linger 0", "peer AF_UNSPEC", "AF_UNSPEC", "1 byte", "1000 bytes", "urgent", "0 bytes", "NODELAY",
                                     "FIONBIO", "RCVTIMEO", "SO_ERROR", "peer exit", "peer killed", "exit unread", "kill unread",
                                     "close unread", "send", "signal", "SA_RESTART", "peer reads all", "handler SHUT_WR", "SHUT_WR SA_RESTART",
                                     "handler SHUT_RD", "SHUT_RD SA_RESTART", "handler SHUT_RDWR", "SHUT_RDWR SA_RESTART"};

static int how; /* -1: the handler shuts nothing down */

static void handler(int n) {
    (void)n;
    if (how >= 0) shutdown(fd, how);
}

static void happens(int event, pthread_t t) {
    struct timeval tv = {0, 1000};
    int on = 1, e = 0;
    socklen_t n = sizeof e;
    int handles = event >= IN_HANDLER, restarts = handles ? (event - IN_HANDLER) % 2 : event == RESTARTED;
    static const int hows[] = {SHUT_WR, SHUT_RD, SHUT_RDWR};
    struct sigaction a = {.sa_handler = handler, .sa_flags = restarts ? SA_RESTART : 0};
    how = handles ? hows[(event - IN_HANDLER) / 2] : -1;
    if (event == EXIT_UNREAD || event == KILL_UNREAD || event == CLOSE_UNREAD) {
        if (!fills(call)) NEED(send(fd, large, 300, MSG_NOSIGNAL) == 300);
        NEED(tell('?'));
    }
    switch (event) {
    case SHUT_WR_: shutdown(fd, SHUT_WR); break;
    case SHUT_RD_: shutdown(fd, SHUT_RD); break;
    case SHUT_BOTH: shutdown(fd, SHUT_RDWR); break;
    case PEER_WR: tell('w'); break;
    case PEER_RD: tell('r'); break;
    case PEER_BOTH: tell('b'); break;
    case PEER_CLOSE: case CLOSE_UNREAD: tell('c'); break;
    case PEER_LINGER: tell('l'); break;
    case PEER_UNSPEC: tell('u'); break;
    case UNSPEC: disconnect(fd); break;
    case ONE: tell('1'); break;
    case MANY: tell('9'); break;
    case OOB: tell('o'); break;
    case ZERO: tell('z'); break;
    case NODELAY: setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on); break;
    case NONBLOCK: ioctl(fd, FIONBIO, &on); break;
    case TIMEO: setsockopt(fd, SOL_SOCKET, fills(call) ? SO_SNDTIMEO : SO_RCVTIMEO, &tv, sizeof tv); break;
    case SO_ERROR_: getsockopt(fd, SOL_SOCKET, SO_ERROR, &e, &n); break;
    case EXIT: case EXIT_UNREAD: tell('x'); break;
    case KILL: case KILL_UNREAD: tell('k'); break;
    case SEND_OWN: if (!fills(call)) send(fd, "s", 1, MSG_NOSIGNAL); break;
    case ALL: tell('a'); break;
    default:
        sigaction(SIGUSR1, &a, NULL);
        pthread_kill(t, SIGUSR1);
    }
}

/* ---- a case ---- */

static void one(FILE *out, int event, int wait_ms) {
    int e = -1, before;
    socklen_t n = sizeof e;
    begin();
    prepare();
    pthread_t t = asleep();
    if (woken) {
        fprintf(out, "%d %s, %s: did not sleep %ld %s\n", CASE + call * 100 + event, calls[call], events[event], said, name_of(why));
        NEED(!pthread_join(t, NULL));
        goto over;
    }
    happens(event, t);
    before = until_woken(wait_ms);
    fprintf(out, "%d %s, %s: %s", CASE + call * 100 + event, calls[call], events[event], before ? "woken" : "slept on");
    if (!before) {
        if (fills(call)) tell('A');
        else tell('9');
        if (!until_woken(call == POLL0 || call == POLLRDHUP_ ? 0 : 10000)) tell('c');
        if (call == POLL0) shutdown(fd, SHUT_RDWR);
        if (!until_woken(10000)) fprintf(out, " IN VAIN");
        until_woken(50000);
    }
    NEED(woken);
    NEED(!pthread_join(t, NULL));
    if (fills(call) && call != POLLOUT_ && said > 0) said = said == FULL ? FULL : 1;
    fprintf(out, ", %ld %s;", said, said < 0 ? name_of(why) : "-");
    sleep_us(3000);
    struct pollfd p = {fd, POLLIN | POLLRDHUP | POLLPRI | (fills(call) ? 0 : POLLOUT), 0};
    poll(&p, 1, 0);
    fprintf(out, " %x", p.revents);
    if (event % 2) {
        NEED(!getsockopt(fd, SOL_SOCKET, SO_ERROR, &e, &n));
        fprintf(out, " %s", name_of(e));
    }
    for (int k = 0; k < 3; k++) {
        long r = recv(fd, got, sizeof got, MSG_DONTWAIT);
        fprintf(out, " %ld%s", r, r < 0 ? name_of(errno) : "");
    }
    for (int k = 0; k < 2 && !fills(call); k++) {
        long r = send(fd, "s", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
        fprintf(out, " %ld%s", r, r < 0 ? name_of(errno) : "");
    }
    fprintf(out, "\n");
over:
    fflush(out);
    close(fd), close(orders[0]);
    kill(other, SIGKILL);
    NEED(waitpid(other, 0, 0) == other);
    char b[100];
    while (read(pipes[0], b, sizeof b) > 0) {}
}

/* What the kernel itself says now this way, now that; and a part that was peeked at before an urgent byte or a disconnect. */
static int is_open(int event) {
    return fills(call) && event == PEER_RD || call == PEEKALL && (event == OOB || event == UNSPEC);
}

int main(int argc, char **argv) {
    NEED(argc > 3);
    signal(SIGPIPE, SIG_IGN);
    large = calloc(1, FULL);
    NEED(large && !pipe2(pipes, O_NONBLOCK));
    FILE *out = fopen(argv[1], "w");
    NEED(!!out);
    int wait_ms = atoi(argv[2]), begin = atoi(argv[3]);
    if (begin >= CASE) {
        for (int k = 3; k < argc; k++) {
            int which = atoi(argv[k]) % CASE;
            call = which / 100, one(out, which % 100, wait_ms);
        }
    } else {
        NEED(argc == 6 && atoi(argv[5]) <= CALLS);
        for (int n = begin, parts = atoi(argv[4]); n < atoi(argv[5]) * EVENTS; n += parts) {
            call = n / EVENTS;
            if (!is_open(n % EVENTS)) one(out, n % EVENTS, wait_ms);
        }
    }
    fclose(out);
    printf("result ok lanes %d\n", lanes);
    return 0;
}
