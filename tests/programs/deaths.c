/* The other end dies or closes, with bytes unread or not, while bytes of its own are unread here or not: what polls, sets
 * and calls say of it, at once and after each of the following reads.
 *
 *     deaths OUT WAIT_MS DAEMON FIRST STEP  the cases FIRST, FIRST + STEP ...
 *     deaths OUT WAIT_MS DAEMON CASE...     those: case numbers plus 1000000 (and any multiple of CASES)
 *
 * One line for each case, the same bare and on lanes. WAIT_MS says how long a call may sleep on. DAEMON: this process is
 * stopped while that happens, for what it would tell must not be needed; 0: none.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>

#include "other.h"

#define CASE 1000000

/* ---- who is told first ---- */

enum { FOR_IN, FOR_RDHUP, FOR_OUT, FOR_NONE, FOR_ALL, SELECT_R, SELECT_W, EPOLL_IN, EPOLL_ALL, EPOLL_ET, EPOLL_ONCE,
       EPOLL_NONE, EPOLL_OUT, EPOLL_ET_IN, RECV, PEEK, SEND, ERROR, FIRSTS };
static const char *const firsts[] = {"POLLIN", "POLLRDHUP", "POLLOUT", "poll 0", "poll all", "select r", "select w", "epoll IN", "epoll all",
                                     "epoll ET", "epoll once", "epoll 0", "epoll OUT", "epoll ET IN", "recv", "peek", "send", "SO_ERROR"};
enum { ALL = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLPRI };

/* A case. */
static struct {
    int first, asleep, here, there, way, shut, seen, then;
} now;

static int took(int *n, int of) {
    int v = *n % of;
    *n /= of;
    return v;
}

#define CASES (FIRSTS * 3 * 3 * 2 * 3 * 4 * 2 * 4)
static const int here[] = {0, 1000, 30000}, there[] = {300, 0, 30000};

static void choose(int n) {
    now.first = took(&n, FIRSTS), now.here = here[took(&n, 3)], now.there = there[took(&n, 3)], now.asleep = !took(&n, 2);
    now.way = took(&n, 3), now.shut = took(&n, 4), now.seen = took(&n, 2), now.then = took(&n, 4);
}

static long polled(int events, int ms) {
    struct pollfd p = {fd, (short)events, 0};
    int n = poll(&p, 1, ms);
    return n == 1 ? p.revents : n;
}

static long selected(int writes, int ms) {
    struct timeval t = {ms / 1000, ms % 1000 * 1000};
    fd_set s[2];
    FD_ZERO(&s[0]);
    FD_ZERO(&s[1]);
    FD_SET(fd, &s[writes]);
    return select(fd + 1, writes ? NULL : &s[0], writes ? &s[1] : NULL, NULL, &t);
}

static int watched(unsigned events) {
    struct epoll_event ev = {events, {0}};
    int set = epoll_create1(0);
    NEED(set >= 0 && !epoll_ctl(set, EPOLL_CTL_ADD, fd, &ev));
    return set;
}

static long told(int set, int ms) {
    struct epoll_event ev = {0};
    int n = epoll_wait(set, &ev, 1, ms);
    return n == 1 ? ev.events : n;
}

static long asked(unsigned events) {
    int set = watched(events);
    long r = told(set, 20000);
    int e = errno;
    close(set);
    errno = e;
    return r;
}

static long error(void) {
    int e = -1;
    socklen_t n = sizeof e;
    NEED(!getsockopt(fd, SOL_SOCKET, SO_ERROR, &e, &n));
    return e;
}

static long made(void) {
    switch (now.first) {
    case FOR_IN: return polled(POLLIN, 20000);
    case FOR_RDHUP: return polled(POLLRDHUP, 20000);
    case FOR_OUT: return polled(POLLOUT, 20000);
    case FOR_NONE: return polled(0, 20000);
    case FOR_ALL: return polled(ALL, 20000);
    case SELECT_R: return selected(0, 20000);
    case SELECT_W: return selected(1, 20000);
    case EPOLL_IN: return asked(EPOLLIN);
    case EPOLL_ALL: return asked(ALL);
    case EPOLL_ET: return asked(ALL | EPOLLET);
    case EPOLL_ONCE: return asked(ALL | EPOLLONESHOT);
    case EPOLL_NONE: return asked(0);
    case EPOLL_OUT: return asked(EPOLLOUT);
    case EPOLL_ET_IN: return asked(EPOLLIN | EPOLLET);
    case RECV: return recv(fd, got, 100, 0);
    case PEEK: return recv(fd, got, 100, MSG_PEEK);
    case SEND: return send(fd, "s", 1, MSG_NOSIGNAL);
    default: return error();
    }
}

/* ---- who is told after that ---- */

static const unsigned masks[] = {ALL, ALL | EPOLLET, EPOLLIN | EPOLLET, ALL | EPOLLONESHOT, EPOLLOUT, 0};
enum { SETS = sizeof masks / sizeof *masks };
static int sets[SETS];

static void say(FILE *out, const char *name, long r) {
    if (r < 0) fprintf(out, " %s %s", name, name_of(errno));
    else fprintf(out, " %s %lx", name, r);
}

static void all_say(FILE *out) {
    fprintf(out, " [");
    for (int k = 0; k < SETS; k++)
        for (int turn = 0; turn < 2; turn++) say(out, turn ? "," : "", told(sets[k], 0));
    fprintf(out, " |");
    say(out, "", polled(ALL, 0));
    say(out, "", polled(0, 0));
    say(out, "", selected(0, 0));
    say(out, "", selected(1, 0));
    fprintf(out, "]");
}

/* ---- a case ---- */

static int state_of_tcp(void) {
    return info(fd).tcpi_state;
}

static pid_t daemon_pid;

static void stop_daemon(int stop) {
    char name[32], state = 0;
    if (!daemon_pid || !under_shim()) return;
    NEED(!kill(daemon_pid, stop ? SIGSTOP : SIGCONT));
    snprintf(name, sizeof name, "/proc/%d/stat", daemon_pid);
    for (int k = 0; stop && state != 'T'; k++) {
        FILE *f = fopen(name, "r");
        NEED(k < 100000 && f && fscanf(f, "%*d %*s %c", &state) == 1);
        fclose(f);
    }
}

/* The other end is gone, and what its kernel says of that has come. */
static void until_gone(void) {
    enum { CLOSED = 7, CLOSE_WAIT = 8 };
    if (now.way == 2) {
        NEED(tell('c'));
    } else {
        tell(now.way ? 'k' : 'x');
        NEED(waitpid(other, 0, 0) == other);
    }
    /* (On a lane the kernel does not know of bytes unread.) */
    int kernel = !under_shim() && now.there ? CLOSED : CLOSE_WAIT;
    for (int k = 0; state_of_tcp() != CLOSED && !(kernel == CLOSE_WAIT && (state_of_tcp() == CLOSE_WAIT || now.shut == 2)); k++) {
        NEED(k < 100000);
        sleep_us(100);
    }
    sleep_us(2000);
}

static void nothing(int n) {
    (void)n;
}

static void before(void) {
    if (now.here) NEED(tell(now.here > 1000 ? 'L' : '9'));
    for (int k = 0; k < SETS && now.seen == 0; k++) sets[k] = watched(masks[k]);
    if (now.here) until_there(fd, now.here);
    if (now.there) NEED(send(fd, large, (size_t)now.there, MSG_NOSIGNAL) == now.there && tell('?'));
    if (now.shut == 1) {
        NEED(tell('w'));
        while (!(polled(POLLRDHUP, 0) & POLLRDHUP)) sleep_us(100);
    }
    if (now.shut == 2) NEED(!shutdown(fd, SHUT_WR));
    if (now.shut == 3) NEED(!shutdown(fd, SHUT_RD));
    for (int k = 0; k < SETS && now.seen == 1; k++) sets[k] = watched(masks[k]), told(sets[k], 0);
}

/* Received, and the right bytes. */
static long taken(long *at, long r) {
    int e = errno;
    if (r > 0) {
        NEED(!memcmp(got, large + *at, (size_t)r));
        *at += r;
    }
    errno = e;
    return r;
}

static void then(FILE *out) {
    long at = now.first == RECV && said > 0 ? said : 0, piece = now.here > 1000 ? 10000 : 300;
    char name[8] = "";
    if (now.then == 1) say(out, "e", error());
    if (now.then == 2) say(out, "s", send(fd, "s", 1, MSG_DONTWAIT | MSG_NOSIGNAL));
    if (now.then == 3) say(out, "p", recv(fd, got, sizeof got, MSG_DONTWAIT | MSG_PEEK));
    if (now.then) all_say(out);
    for (int k = 0; k < 7; k++) {
        snprintf(name, sizeof name, "r%d", k);
        say(out, name, taken(&at, recv(fd, got, (size_t)piece, MSG_DONTWAIT)));
        if (k < 5) all_say(out);
    }
    for (int k = 0; k < 2; k++) say(out, "s", send(fd, "s", 1, MSG_DONTWAIT | MSG_NOSIGNAL));
    say(out, "e", error());
    all_say(out);
}

static void one(FILE *out, int n, int wait_ms) {
    static const char *const ways[] = {"exit", "kill", "close"}, *const shuts[] = {"", ", ended before", ", SHUT_WR", ", SHUT_RD"};
    pthread_t t;
    choose(n);
    begin();
    before();
    if (now.asleep) t = asleep();
    stop_daemon(1);
    until_gone();
    fprintf(out, "%d %s %s, unread here %d, there %d, %s%s:", CASE + n, firsts[now.first], now.asleep ? "asleep" : "after", now.here, now.there,
            ways[now.way], shuts[now.shut]);
    if (!now.asleep) woken = 0, NEED(!pthread_create(&t, 0, thread, 0));
    if (!until_woken(wait_ms)) {
        fprintf(out, " sleeps on,");
        for (int k = 0; !woken; k++) {
            NEED(k < 1000);
            pthread_kill(t, SIGUSR1);
            until_woken(20);
        }
    }
    NEED(!pthread_join(t, NULL));
    errno = why;
    say(out, "says", said);
    all_say(out);
    then(out);
    fprintf(out, "\n");
    fflush(out);
    for (int k = 0; k < SETS; k++) close(sets[k]);
    close(fd), close(orders[0]);
    stop_daemon(0);
    if (now.way == 2) {
        kill(other, SIGKILL);
        NEED(waitpid(other, 0, 0) == other);
    }
}

int main(int argc, char **argv) {
    NEED(argc > 4);
    struct sigaction a = {.sa_handler = nothing};
    sigaction(SIGUSR1, &a, NULL);
    signal(SIGPIPE, SIG_IGN);
    large = calloc(1, FULL);
    FILE *out = fopen(argv[1], "w");
    NEED(large && out);
    for (int k = 0; k < 30000; k++) large[k] = (char)(k * 7 + k / 251);
    int wait_ms = atoi(argv[2]), begin = atoi(argv[4]);
    daemon_pid = atoi(argv[3]);
    if (begin >= CASE) {
        for (int k = 4; k < argc; k++) one(out, atoi(argv[k]) % CASE, wait_ms);
    } else {
        NEED(argc == 6);
        for (int n = begin; n < CASES; n += atoi(argv[5])) one(out, n, wait_ms);
    }
    fclose(out);
    printf("result ok lanes %d\n", lanes);
    return 0;
}
