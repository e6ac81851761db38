/* A close that lingers frees its number at once, and whatever gets the number then can be used while it lingers.
 *
 *     lingering
 *
 * Both ends are in this process. Prints "result ok".
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>

#include "pairs.h"

static int closed; /* atomic: release by the closer, acquire by who looks */

static void *closes(void *fd) {
    close((int)(long)fd);
    __atomic_store_n(&closed, 1, __ATOMIC_RELEASE);
    return 0;
}

static char buffer[1 << 16];

/* What takes the number, by each of the ways there are; the first uses the number while nothing has it. */
static void take(int how, int fd, int null) {
    uint64_t one = 1;
    sigset_t none;
    int two[2];
    if (how == 0) {
        NEED(write(fd, "w", 1) < 0 && errno == EBADF);
        NEED(recv(fd, buffer, 1, MSG_DONTWAIT) < 0 && errno == EBADF);
        NEED(dup(fd) < 0 && errno == EBADF);
    } else if (how == 1) {
        NEED(open("/dev/null", O_RDWR) == fd && write(fd, "w", 1) == 1);
    } else if (how == 2) {
        NEED(fcntl(null, F_DUPFD, fd) == fd && write(fd, "w", 1) == 1);
    } else if (how == 3) {
        NEED(eventfd(0, 0) == fd && write(fd, &one, 8) == 8 && read(fd, &one, 8) == 8);
    } else if (how == 4) {
        FILE *f = fopen("/dev/null", "r+");
        NEED(f && fileno(f) == fd && write(fd, "w", 1) == 1);
        fclose(f);
    } else if (how == 5) {
        sigemptyset(&none);
        NEED(signalfd(-1, &none, SFD_NONBLOCK) == fd && read(fd, buffer, 128) < 0 && errno == EAGAIN);
    } else if (how == 6) {
        NEED(!socketpair(AF_UNIX, SOCK_STREAM, 0, two) && two[0] == fd);
        NEED(write(fd, "w", 1) == 1 && read(two[1], buffer, 9) == 1);
        close(two[1]);
    } else {
        NEED(raw(SYS_dup3, null, fd, 0, 0, 0) == fd && write(fd, "w", 1) == 1);
    }
    NEED(!__atomic_load_n(&closed, __ATOMIC_ACQUIRE));
    if (how != 0 && how != 4) close(fd);
}

int main(void) {
    int a, b, c, d, one = 1, null = open("/dev/null", O_RDWR);
    dial(&c, &d);
    warm(c, d);
    for (int how = 0; how < 8; how++) {
        struct linger l = {1, 100};
        pthread_t t;
        closed = 0;
        dial(&a, &b);
        NEED(!setsockopt(a, SOL_SOCKET, SO_TIMESTAMP, &one, sizeof one)); /* keeps it on TCP */
        NEED(!setsockopt(a, SOL_SOCKET, SO_LINGER, &l, sizeof l));
        size_t sent = 0;
        struct pollfd room = {a, POLLOUT, 0};
        do { /* until the other side's buffer has grown as far as it does: the close would not linger */
            for (ssize_t n; (n = send(a, buffer, sizeof buffer, MSG_DONTWAIT)) > 0;) sent += n;
        } while (poll(&room, 1, 300) > 0);
        NEED(!pthread_create(&t, 0, closes, (void *)(long)a));
        while (raw(SYS_fcntl, a, F_GETFD, 0, 0, 0) >= 0) sleep_us(100);
        take(how, a, null);
        for (ssize_t n; sent && (n = recv(b, buffer, sizeof buffer, 0)) > 0;) sent -= n;
        NEED(sent == 0 && recv(b, buffer, 1, 0) == 0);
        close(b);
        NEED(!pthread_join(t, 0));
        by_lane(c, d);
    }
    printf("result ok\n");
    return 0;
}
