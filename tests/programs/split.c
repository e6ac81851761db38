/* A thread with descriptors of its own: it closes there what the others go on with, and has a file at that
   number. What each of them sends goes where its own number leads.

       split unshare | range | number

   Prints "result ok". */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { WARM = 3000, ROUNDS = 2000, LINES = 500 };

static const char *how;
static int ours, theirs, listener;
static struct sockaddr_in address = {.sin_family = AF_INET};
static pthread_barrier_t barrier;

static void must(int ok, const char *what) {
	if (!ok) {
		fprintf(stderr, "%s: %s\n", what, strerror(errno));
		exit(1);
	}
}

static void all(int fd, char *buf, size_t n, int out) {
	for (size_t at = 0; at < n;) {
		ssize_t r = out ? send(fd, buf + at, n - at, MSG_NOSIGNAL) : recv(fd, buf + at, n - at, 0);
		must(r > 0, out ? "send" : "recv");
		at += (size_t)r;
	}
}

static void one_way(int from, int to, int k) {
	char out[64], in[64];
	memset(out, k, sizeof out);
	all(from, out, sizeof out, 1);
	all(to, in, sizeof in, 0);
	must(!memcmp(in, out, sizeof in), "other bytes");
}

static void ping(int turns) {
	for (int k = 0; k < turns; k++) {
		one_way(ours, theirs, k);
		one_way(theirs, ours, k + 1);
		if (k % 100 == 0)
			usleep(2000); /* for the daemon */
	}
}

static int dial(int *other) {
	int fd = socket(AF_INET, SOCK_STREAM, 0), on = 1;
	must(!connect(fd, (void *)&address, sizeof address), "connect");
	*other = accept(listener, 0, 0);
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
	setsockopt(*other, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
	return fd;
}

static void *splits(void *unused) {
	if (!strcmp(how, "range")) {
		must(!close_range((unsigned)ours, (unsigned)ours, CLOSE_RANGE_UNSHARE), "close_range");
	} else if (!strcmp(how, "number")) {
		must(!syscall(SYS_unshare, CLONE_FILES) && !syscall(SYS_close, ours), "by number");
	} else {
		must(!unshare(CLONE_FILES) && !close(ours), "unshare");
	}
	int file = open("/tmp", O_TMPFILE | O_RDWR, 0600);
	must(file == ours, "the lowest number that is free");
	pthread_barrier_wait(&barrier);
	for (int k = 0; k < LINES; k++)
		must(write(file, "for the file\n", 13) == 13, "write");
	must(lseek(file, 0, SEEK_END) == LINES * 13, "size of the file");
	/* And a connection at that number, while the others use theirs. */
	close(file);
	int other, own = dial(&other);
	must(own == ours, "the number again");
	for (int k = 0; k < ROUNDS; k++)
		one_way(own, other, k), one_way(other, own, k);
	close(own), close(other);
	pthread_barrier_wait(&barrier);
	return unused;
}

int main(int argc, char **argv) {
	socklen_t n = sizeof address;
	must(argc == 2, "usage");
	how = argv[1];
	listener = socket(AF_INET, SOCK_STREAM, 0);
	inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
	must(!bind(listener, (void *)&address, n) && !listen(listener, 5) &&
	         !getsockname(listener, (void *)&address, &n),
	     "listen");
	ours = dial(&theirs);
	ping(WARM);
	pthread_barrier_init(&barrier, 0, 2);
	pthread_t t;
	must(!pthread_create(&t, 0, splits, 0), "thread");
	pthread_barrier_wait(&barrier);
	ping(ROUNDS);
	pthread_barrier_wait(&barrier);
	pthread_join(t, 0);
	ping(1);
	close(ours);
	char c;
	must(recv(theirs, &c, 1, 0) == 0, "the end");
	puts("result ok");
	return 0;
}
