/* A connection on a lane whose other end is a process of its own that does what it is told, and a thread that sleeps in
 * a call on it. (Needs _GNU_SOURCE.) */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "lanes.h"
#include "pairs.h"

#define FULL (24 << 20)

static int fd, orders[2], lanes;
static pid_t other;
static char *large, got[70000];

/* ---- the other end ---- */

static void disconnect(int s) {
    struct sockaddr none = {.sa_family = AF_UNSPEC};
    NEED(!connect(s, &none, sizeof none));
}

static void no_delay(int s) {
    int one = 1;
    NEED(!setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one));
}

static void linger_0(int s) {
    struct linger l = {1, 0};
    NEED(!setsockopt(s, SOL_SOCKET, SO_LINGER, &l, sizeof l));
    close(s);
}

static void until_there(int c, int n) {
    int there = 0;
    for (int k = 0; k < 20000 && there < n; k++) NEED(!ioctl(c, FIONREAD, &there)), sleep_us(200);
    NEED(there >= n);
}

static void peer(int c, int order) {
    char what, b[64];
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    no_delay(c);
    while (read(order, &what, 1) == 1) {
        switch (what) {
        case 'e': NEED(recv(c, b, 64, MSG_WAITALL) == 64 && send(c, b, 64, 0) == 64); break;
        case 'w': shutdown(c, SHUT_WR); break;
        case 'r': shutdown(c, SHUT_RD); break;
        case 'b': shutdown(c, SHUT_RDWR); break;
        case 'c': close(c), c = -1; break;
        case 'l': linger_0(c), c = -1; break;
        case 'u': disconnect(c); break;
        case '1': send(c, "z", 1, MSG_NOSIGNAL); break;
        case '9': send(c, large, 1000, MSG_NOSIGNAL); break;
        case 'L': send(c, large, 30000, MSG_NOSIGNAL); break;
        case 'o': send(c, "u", 1, MSG_OOB | MSG_NOSIGNAL); break;
        case 'z': send(c, "u", 0, MSG_NOSIGNAL); break;
        case '?': until_there(c, 300); break;
        case 'a': /* all there is */
            for (long n; (n = recv(c, got, sizeof got, MSG_DONTWAIT)) > 0;) {}
            break;
        case 'A': /* all that may come */
            sleep_us(1000);
            NEED(write(order, "d", 1) == 1);
            for (long n, all = 0; all < FULL && (n = recv(c, got, sizeof got, 0)) > 0; all += n) {}
            continue;
        case 'x': _exit(0);
        case 'k': kill(getpid(), SIGKILL);
        }
        NEED(write(order, "d", 1) == 1);
    }
    _exit(0);
}

static int tell(char what) {
    char b;
    return write(orders[0], &what, 1) == 1 && read(orders[0], &b, 1) == 1;
}

static void begin(void) {
    socklen_t n = sizeof address;
    NEED(!socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, orders));
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET, address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    listener = socket(AF_INET, SOCK_STREAM, 0);
    NEED(!bind(listener, (void *)&address, n) && !listen(listener, 1) && !getsockname(listener, (void *)&address, &n));
    if (!(other = fork())) {
        close(orders[0]);
        int c = accept(listener, 0, 0);
        NEED(c >= 0);
        close(listener);
        peer(c, orders[1]);
    }
    close(orders[1]);
    fd = socket(AF_INET, SOCK_STREAM, 0);
    NEED(!connect(fd, (void *)&address, n));
    close(listener);
    no_delay(fd);
    for (int turn = 0, lane = 0; !lane; turn++) {
        char b[64] = {0};
        struct moved before = moved(fd);
        NEED(turn < 20000);
        NEED(send(fd, b, 64, 0) == 64);
        NEED(tell('e') && recv(fd, b, 64, MSG_WAITALL) == 64);
        lane = turn > 2 && (still(fd, before) || !under_shim());
        lanes += lane && under_shim();
        sleep_us(lane || !under_shim() ? 0 : 500);
    }
}

/* ---- a thread that sleeps ---- */

/* The call that it makes. */
static long made(void);

static atomic_int sleeper, woken;
static int why;
static long said;

static void *thread(void *arg) {
    sleeper = (int)syscall(SYS_gettid);
    errno = 0;
    said = made(), why = errno;
    woken = 1;
    return arg;
}

static pthread_t asleep(void) {
    char name[64], state = 0;
    pthread_t t;
    sleeper = woken = 0, said = -2;
    NEED(!pthread_create(&t, 0, thread, 0));
    while (!sleeper) sleep_us(100);
    snprintf(name, sizeof name, "/proc/self/task/%d/stat", sleeper);
    for (int seen = 0, k = 0; seen < 3 && !woken && k < 5000; seen = state == 'S' ? seen + 1 : 0, k++) {
        FILE *f = fopen(name, "r");
        if (!f || fscanf(f, "%*d %*s %c", &state) != 1) state = 'S';
        if (f) fclose(f);
        sleep_us(1000);
    }
    return t;
}

static int until_woken(int ms) {
    for (int k = 0; k < ms * 2 && !woken; k++) sleep_us(500);
    return woken;
}

static const char *name_of(int e) {
    return e ? strerrorname_np(e) : "-";
}
