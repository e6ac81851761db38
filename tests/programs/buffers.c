/* What a sender that does not wait gets rid of, of which nobody reads anything, where sizes of buffers were asked for.
 *
 *     buffers
 *
 * Holds both ends of each connection. Prints a line for each answer: "=" must be as bare, "~" about so much. Then
 * the other end reads some of it and closes, and the errors of that are as bare.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { KIB = 1024, MOST = 16 << 20 };
enum when { NEVER, ON_LISTENER, AT_FIRST, ON_LANE, BY_NUMBER };

static const struct {
    const char *name;
    int level, option, size; /* of the sender */
    enum when when;
    int room; /* SO_RCVBUF of the receiver */
    enum when room_when;
    int piece, file;
} cases[] = {
    {"both-small", SOL_SOCKET, SO_SNDBUF, 4 * KIB, AT_FIRST, 4 * KIB, ON_LISTENER, 4 * KIB, 0},
    {"both-small-file", SOL_SOCKET, SO_SNDBUF, 4 * KIB, AT_FIRST, 4 * KIB, ON_LISTENER, 256 * KIB, 1},
    {"both-on-lane", SOL_SOCKET, SO_SNDBUF, 4 * KIB, ON_LANE, 4 * KIB, ON_LANE, 4 * KIB, 0},
    {"by-number", SOL_SOCKET, SO_SNDBUF, 4 * KIB, BY_NUMBER, 4 * KIB, BY_NUMBER, 4 * KIB, 0},
    {"least", SOL_SOCKET, SO_SNDBUF, 1, AT_FIRST, 1, ON_LISTENER, 1 * KIB, 0},
    {"pieces", SOL_SOCKET, SO_SNDBUF, 16 * KIB, AT_FIRST, 16 * KIB, ON_LISTENER, 100, 0},
    {"both-medium", SOL_SOCKET, SO_SNDBUF, 32 * KIB, AT_FIRST, 64 * KIB, ON_LISTENER, 16 * KIB, 0},
    {"send-small", SOL_SOCKET, SO_SNDBUF, 4 * KIB, AT_FIRST, 0, NEVER, 4 * KIB, 0},
    {"send-small-large-piece", SOL_SOCKET, SO_SNDBUF, 4 * KIB, ON_LANE, 0, NEVER, 256 * KIB, 0},
    {"send-listener", SOL_SOCKET, SO_SNDBUF, 8 * KIB, ON_LISTENER, 0, NEVER, 4 * KIB, 0},
    {"send-medium", SOL_SOCKET, SO_SNDBUF, 64 * KIB, AT_FIRST, 0, NEVER, 16 * KIB, 0},
    {"send-large", SOL_SOCKET, SO_SNDBUF, 200 * KIB, AT_FIRST, 0, NEVER, 16 * KIB, 0},
    {"unsent", IPPROTO_TCP, TCP_NOTSENT_LOWAT, 4 * KIB, AT_FIRST, 8 * KIB, ON_LISTENER, 4 * KIB, 0},
    {"unsent-on-lane", IPPROTO_TCP, TCP_NOTSENT_LOWAT, 1, ON_LANE, 0, NEVER, 4 * KIB, 0},
};

static char area[256 * KIB];
static int file, lanes;

static void need(int ok, const char *what) {
    if (ok) return;
    printf("FAILED %s: %s\n", what, strerror(errno));
    exit(1);
}

/* An inlined system call, which no shim sees. */
static struct tcp_info info(int fd) {
    struct tcp_info i = {0};
    socklen_t n = sizeof i;
#ifdef __x86_64__
    long r;
    register long r10 __asm__("r10") = (long)&i, r8 __asm__("r8") = (long)&n;
    __asm__ volatile("syscall" : "=a"(r) : "a"(SYS_getsockopt), "D"(fd), "S"(IPPROTO_TCP), "d"(TCP_INFO), "r"(r10), "r"(r8)
                     : "rcx", "r11", "memory");
#else
    getsockopt(fd, IPPROTO_TCP, TCP_INFO, &i, &n);
#endif
    return i;
}

static void ask_for(int fd, int level, int option, int size, int by_number) {
    long r = by_number ? syscall(SYS_setsockopt, fd, level, option, &size, sizeof size)
                       : setsockopt(fd, level, option, &size, sizeof size);
    need(!r, "setsockopt");
}

static int option(int fd, int level, int name) {
    int v = -1;
    socklen_t n = sizeof v;
    need(!getsockopt(fd, level, name, &v, &n), "getsockopt");
    return v;
}

static void warm_up(int *ends) {
    char b[64] = {0};
    int shim = !!getenv("UNDERPASS_DIR");
    for (int k = 0; k < (shim ? 2000 : 2); k++) {
        uint64_t before = info(ends[0]).tcpi_bytes_received + info(ends[1]).tcpi_bytes_received;
        for (int j = 0; j < 2; j++) {
            need(send(ends[j], b, sizeof b, 0) == sizeof b, "send");
            need(recv(ends[!j], b, sizeof b, MSG_WAITALL) == sizeof b, "recv");
        }
        if (before == info(ends[0]).tcpi_bytes_received + info(ends[1]).tcpi_bytes_received) {
            lanes += shim;
            return;
        }
        usleep(shim ? 300 : 0);
    }
    need(!shim, "a lane");
}

static int ready(int fd, short events) {
    struct pollfd p = {fd, events, 0};
    need(poll(&p, 1, 0) >= 0, "poll");
    return p.revents;
}

/* Until nothing more is taken, three times in a row: bare, what is sent arrives in its own time. (Not for long: a ring
 * that stays full goes down.) */
static long fill(int fd, int piece, int from_file) {
    long all = 0;
    int naps = getenv("UNDERPASS_DIR") ? 20 : 60;
    for (int idle = 0; idle < 3; idle++) {
        for (;;) {
            long n = from_file ? sendfile(fd, file, &(off_t){0}, piece) : send(fd, area, piece, MSG_NOSIGNAL);
            if (n < 0) {
                need(errno == EAGAIN, "send");
                break;
            }
            all += n;
            idle = 0;
            if (all > MOST) return all;
        }
        for (int k = 0; k < naps && info(fd).tcpi_unacked; k++) usleep(100);
        if (ready(fd, POLLOUT)) idle = -1;
    }
    return all;
}

static long take(int fd, long most) {
    long all = 0, n;
    while (all < most && (n = recv(fd, area, most - all < (long)sizeof area ? most - all : (long)sizeof area, MSG_DONTWAIT)) > 0)
        all += n;
    return all;
}

/* The other end closes with bytes unread, while this one has more to send. */
static void close_in_the_middle(const char *name, int *ends, int piece, int from_file) {
    fill(ends[0], piece, from_file);
    need(take(ends[1], 100) == 100, "some bytes");
    close(ends[1]);
    long e = 0;
    for (int k = 0; k < 100000 && !e; k++) {
        struct pollfd p = {ends[0], POLLOUT, 0};
        poll(&p, 1, 1000);
        long n = from_file ? sendfile(ends[0], file, &(off_t){0}, piece) : send(ends[0], area, piece, MSG_NOSIGNAL);
        e = n < 0 && errno != EAGAIN ? errno : 0;
    }
    printf("= %s closed %s\n", name, strerrorname_np(e));
    printf("= %s events %x\n", name, ready(ends[0], POLLIN | POLLOUT | POLLRDHUP));
    long n = recv(ends[0], area, 10, MSG_DONTWAIT);
    printf("= %s then %ld %s\n", name, n, n < 0 ? strerrorname_np(errno) : "");
}

static void one(int n) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof a;
    int ends[2], on = 1, when = cases[n].when, room_when = cases[n].room_when, room = cases[n].room;
    const char *name = cases[n].name;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    /* The end that sends is the accepted one where its size is the listener's. */
    int accepted = when == ON_LISTENER ? 0 : 1;
    if (when == ON_LISTENER) ask_for(listener, cases[n].level, cases[n].option, cases[n].size, 0);
    if (room_when == ON_LISTENER) ask_for(listener, SOL_SOCKET, SO_RCVBUF, room, 0);
    need(!bind(listener, (void *)&a, sizeof a) && !listen(listener, 8), "listen");
    getsockname(listener, (void *)&a, &len);
    int connected = ends[!accepted] = socket(AF_INET, SOCK_STREAM, 0);
    if (when == AT_FIRST) ask_for(connected, cases[n].level, cases[n].option, cases[n].size, 0);
    need(!connect(connected, (void *)&a, sizeof a), "connect");
    ends[accepted] = accept(listener, NULL, NULL);
    close(listener);
    for (int k = 0; k < 2; k++) setsockopt(ends[k], IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    for (int k = 0; k < 2; k++) ready(ends[k], POLLIN); /* else it is watched in ways that nobody sees */
    warm_up(ends);
    for (int k = 0; k < 2; k++) fcntl(ends[k], F_SETFL, O_NONBLOCK);
    if (room_when >= ON_LANE) ask_for(ends[1], SOL_SOCKET, SO_RCVBUF, room, room_when == BY_NUMBER);
    if (when >= ON_LANE) ask_for(ends[0], cases[n].level, cases[n].option, cases[n].size, when == BY_NUMBER);

    if (cases[n].option == SO_SNDBUF) printf("= %s SO_SNDBUF %d\n", name, option(ends[0], SOL_SOCKET, SO_SNDBUF));
    if (room) printf("= %s SO_RCVBUF %d\n", name, option(ends[1], SOL_SOCKET, SO_RCVBUF));
    printf("= %s POLLOUT %x\n", name, ready(ends[0], POLLOUT));
    long all = fill(ends[0], cases[n].piece, cases[n].file), left = all;
    int queued = 0;
    need(!ioctl(ends[0], SIOCOUTQ, &queued), "SIOCOUTQ");
    printf("~ %s taken %ld\n", name, all);
    printf("~ %s SIOCOUTQ %d\n", name, queued);
    printf("= %s POLLOUT %x\n", name, ready(ends[0], POLLOUT));
    /* Room again when so much is read. */
    while (left > 0 && !ready(ends[0], POLLOUT)) {
        left -= take(ends[1], 512);
        for (int k = 0; k < 20 && info(ends[0]).tcpi_unacked; k++) usleep(50);
    }
    printf("~ %s unread with room %ld\n", name, left);
    /* (Bare, what is under way arrives in its own time.) */
    for (int k = 0; k < 10000 && (left > 0 || !ready(ends[0], POLLOUT)); k++) {
        left -= take(ends[1], 1 << 20);
        usleep(100);
    }
    printf("= %s POLLOUT %x\n", name, ready(ends[0], POLLOUT));
    close_in_the_middle(name, ends, cases[n].piece, cases[n].file);
    close(ends[0]);
}

int main(void) {
    signal(SIGPIPE, SIG_IGN);
    file = open("/tmp", O_TMPFILE | O_RDWR, 0600);
    need(write(file, area, sizeof area) == sizeof area, "file");
    for (unsigned n = 0; n < sizeof cases / sizeof *cases; n++) one(n);
    printf("result ok lanes %d\n", lanes);
    return 0;
}
