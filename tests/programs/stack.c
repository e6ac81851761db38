/* How much stack each call takes: called in a thread whose stack is painted before.
 *
 *     stack LIMIT
 *
 * Fails if a call takes more than LIMIT bytes. Then a thread of PTHREAD_STACK_MIN, and a handler on an
 * alternate stack of SIGSTKSZ, make every one of them. Prints "CALL BYTES" for each, and "result ok".
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define NEED(ok) \
    do { \
        if (!(ok)) { \
            fprintf(stderr, "FAILED line %d: %s (errno %d)\n", __LINE__, #ok, errno); \
            exit(1); \
        } \
    } while (0)

static struct sockaddr_in at;
static socklen_t len = sizeof at;
static int listener, a, b, ep, file, spare[2];
static char buf[100000];
static struct pollfd many[1000];

static void dial(int *x, int *y) {
    *x = socket(AF_INET, SOCK_STREAM, 0);
    NEED(!connect(*x, (void *)&at, len));
    *y = accept(listener, 0, 0);
    NEED(*y >= 0);
}

static void c_send(void) { send(a, "x", 1, 0); }
static void c_write(void) { (void)!write(a, "x", 1); }
static void c_writev(void) {
    struct iovec v[2] = {{"x", 1}, {"y", 1}};
    (void)!writev(a, v, 2);
}
static void c_sendmsg(void) {
    struct iovec v = {"x", 1};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1};
    sendmsg(a, &m, 0);
}
static void c_recv(void) { recv(b, buf, 1, MSG_DONTWAIT); }
static void c_recv_empty(void) { recv(a, buf, 1, MSG_DONTWAIT); }
static void c_read(void) { (void)!read(b, buf, 1); }
static void c_recvmsg(void) {
    struct iovec v = {buf, 1};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1};
    recvmsg(b, &m, MSG_DONTWAIT);
}
static void c_recv_waits(void) {
    struct timeval t = {0, 5000}, none = {0, 0};
    setsockopt(a, SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t);
    recv(a, buf, 1, 0);
    setsockopt(a, SOL_SOCKET, SO_RCVTIMEO, &none, sizeof none);
}
static void c_sendfile(void) {
    off_t o = 0;
    sendfile(a, file, &o, 60000);
}
static void c_poll(void) {
    struct pollfd p = {a, POLLIN, 0};
    poll(&p, 1, 5);
}
static void c_poll_many(void) {
    for (int k = 0; k < 1000; k++) many[k] = (struct pollfd){a, POLLIN, 0};
    poll(many, 1000, 5);
}
static void c_select(void) {
    static fd_set s;
    FD_ZERO(&s);
    FD_SET(a, &s);
    struct timeval t = {0, 5000};
    select(a + 1, &s, 0, 0, &t);
}
static void c_epoll_wait(void) {
    struct epoll_event ev;
    epoll_wait(ep, &ev, 1, 5);
}
static void c_epoll_ctl(void) {
    struct epoll_event ev = {EPOLLIN, {.fd = b}};
    epoll_ctl(ep, EPOLL_CTL_ADD, b, &ev);
    epoll_ctl(ep, EPOLL_CTL_MOD, b, &ev);
    epoll_ctl(ep, EPOLL_CTL_DEL, b, &ev);
}
static void c_ioctl(void) {
    int n;
    ioctl(b, FIONREAD, &n);
}
static void c_options(void) {
    int on = 1;
    socklen_t l = sizeof on;
    setsockopt(a, IPPROTO_TCP, 1, &on, sizeof on);
    getsockopt(a, SOL_SOCKET, SO_ERROR, &on, &l);
    fcntl(a, F_SETFL, fcntl(a, F_GETFL));
}
static void c_dup(void) {
    int d = dup(a);
    dup2(a, d);
    close(d);
}
static void c_dial(void) { dial(&spare[0], &spare[1]); }
static void c_first(void) {
    for (int k = 0; k < 40; k++) {
        send(spare[0], "x", 1, 0), recv(spare[1], buf, 1, 0);
        send(spare[1], "x", 1, 0), recv(spare[0], buf, 1, 0);
        usleep(1000); /* the lane is made elsewhere */
    }
}
static void c_down(void) {
    int fd = spare[0];
    struct iovec v = {"x", 1};
    preadv2(fd, &v, 0, 0, 0);
}
static void c_shutdown(void) { shutdown(spare[0], SHUT_WR); }
static void c_close(void) { close(spare[0]), close(spare[1]); }
static void c_sigaction(void) {
    struct sigaction s;
    sigaction(SIGHUP, 0, &s);
}
static void c_number(void) { syscall(SYS_getpid); }

static struct {
    const char *name;
    void (*call)(void);
} calls[] = {
#define C(x) {#x, c_##x}
    C(send), C(recv), C(write), C(read), C(writev), C(recv), C(sendmsg), C(recvmsg), C(recv_empty),
    C(recv_waits), C(sendfile), C(poll), C(poll_many), C(select), C(epoll_ctl), C(epoll_wait), C(ioctl),
    C(options), C(dup), C(dial), C(first), C(down), C(shutdown), C(close), C(sigaction), C(number),
};
#define CALLS (sizeof calls / sizeof *calls)

static void *run(void *arg) {
    (*(void (**)(void))arg)();
    return 0;
}

static void *every(void *arg) {
    (void)arg;
    for (size_t k = 0; k < CALLS; k++) calls[k].call();
    return 0;
}

static void handler(int sig) {
    (void)sig;
    every(0);
}

#define SIZE (512 * 1024)

/* Bytes of stack that the thread has touched. */
static long depth(unsigned char *stack, void *(*f)(void *), void *arg) {
    pthread_attr_t at;
    pthread_t t;
    memset(stack, 0xaa, SIZE);
    pthread_attr_init(&at);
    NEED(!pthread_attr_setstack(&at, stack, SIZE));
    NEED(!pthread_create(&t, &at, f, arg) && !pthread_join(t, 0));
    long k = 0;
    while (k < SIZE && stack[k] == 0xaa) k++;
    return SIZE - k;
}

static void *nothing(void *arg) { return arg; }

int main(int argc, char **argv) {
    setvbuf(stdout, 0, _IOLBF, 0);
    long limit = argc > 1 ? atol(argv[1]) : SIZE, worst = 0;
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    listener = socket(AF_INET, SOCK_STREAM, 0);
    NEED(!bind(listener, (void *)&at, sizeof at) && !listen(listener, 100));
    getsockname(listener, (void *)&at, &len);
    file = memfd_create("file", 0);
    NEED(write(file, buf, sizeof buf) == sizeof buf);
    dial(&a, &b);
    spare[0] = a, spare[1] = b;
    c_first();
    ep = epoll_create1(0);
    unsigned char *stack = mmap(0, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    long base = depth(stack, nothing, 0);
    for (size_t k = 0; k < CALLS; k++) {
        long n = depth(stack, run, &calls[k].call) - base;
        printf("%s %ld\n", calls[k].name, n);
        if (n > worst) worst = n;
        while (recv(b, buf, sizeof buf, MSG_DONTWAIT) > 0) {}
        if (calls[k].call == c_send || calls[k].call == c_write) c_send();
    }
    if (worst > limit) {
        fprintf(stderr, "FAILED: %ld bytes, not %ld\n", worst, limit);
        return 1;
    }
    pthread_attr_t small;
    pthread_t t;
    pthread_attr_init(&small);
    NEED(!pthread_attr_setstacksize(&small, PTHREAD_STACK_MIN));
    for (int k = 0; k < 20; k++) c_send();
    NEED(!pthread_create(&t, &small, every, 0) && !pthread_join(t, 0));
    stack_t alt = {.ss_sp = malloc(SIGSTKSZ), .ss_size = SIGSTKSZ};
    struct sigaction s = {.sa_handler = handler, .sa_flags = SA_ONSTACK};
    NEED(!sigaltstack(&alt, 0) && !sigaction(SIGUSR1, &s, 0));
    for (int k = 0; k < 20; k++) c_send();
    raise(SIGUSR1);
    printf("result ok\n");
    return 0;
}
