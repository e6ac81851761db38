/* Calls that sleep in recv() and end in other ways than by returning, around the close of their descriptor:
   cancelled, left by siglongjmp, interrupted by a handler that closes, or beside a fork. The peer learns of
   the end when the kernel would say it. Prints what happened; the same bare and under the shim. */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static int ours, theirs;
static sigjmp_buf out;
static volatile int jumped;

static void must(int ok, const char *what) {
	if (!ok) {
		perror(what);
		exit(1);
	}
}

/* A connection, used enough to be promoted. */
static void connection(void) {
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
	socklen_t n = sizeof a;
	int l = socket(AF_INET, SOCK_STREAM, 0), on = 1;
	must(!bind(l, (void *)&a, n) && !listen(l, 5) && !getsockname(l, (void *)&a, &n), "listen");
	ours = socket(AF_INET, SOCK_STREAM, 0);
	must(!connect(ours, (void *)&a, n), "connect");
	theirs = accept(l, 0, 0);
	close(l);
	setsockopt(ours, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
	setsockopt(theirs, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
	char b[64] = {0};
	for (int i = 0; i < 3000; i++) {
		must(send(ours, b, 64, 0) == 64 && recv(theirs, b, 64, MSG_WAITALL) == 64, "forth");
		must(send(theirs, b, 64, 0) == 64 && recv(ours, b, 64, MSG_WAITALL) == 64, "back");
		if (i % 100 == 0)
			usleep(2000);
	}
}

static void *reader(void *unused) {
	char b[10];
	long r = recv(ours, b, 10, 0);
	return (void *)(r < 0 ? (long)-errno : r);
}

static void *jumper(void *unused) {
	char b[10];
	if (!sigsetjmp(out, 1))
		recv(ours, b, 10, 0);
	jumped = 1;
	pause();
	return 0;
}

static void jump(int sig) { siglongjmp(out, 1); }
static void closes(int sig) { close(ours); }

static pthread_t asleep(void *(*f)(void *)) {
	pthread_t t;
	must(!pthread_create(&t, 0, f, 0), "thread");
	usleep(200000);
	return t;
}

static void told(const char *what, pthread_t t) {
	void *r;
	pthread_join(t, &r);
	printf("%s: recv %ld\n", what, r == PTHREAD_CANCELED ? -1000 : (long)r);
}

static void ended(const char *what) {
	struct pollfd p = {theirs, POLLIN, 0};
	char b[4];
	int n = poll(&p, 1, 20000);
	printf("%s: %ld\n", what, n == 1 ? (long)recv(theirs, b, 4, 0) : -99L);
	close(theirs);
}

int main(void) {
	struct sigaction sa = {.sa_handler = closes, .sa_flags = SA_RESTART};
	pthread_t t;

	connection();
	t = asleep(reader);
	close(ours);
	struct pollfd p = {theirs, POLLIN, 0};
	printf("while it sleeps: %d\n", poll(&p, 1, 100));
	pthread_cancel(t);
	told("close, cancel", t);
	ended("close, cancel");

	connection();
	t = asleep(reader);
	pthread_cancel(t);
	told("cancel, close", t);
	close(ours);
	ended("cancel, close");

	signal(SIGUSR1, jump);
	for (int first = 0; first < 2; first++) {
		connection();
		jumped = 0;
		t = asleep(jumper);
		if (first)
			close(ours);
		pthread_kill(t, SIGUSR1);
		while (!jumped)
			usleep(1000);
		if (!first)
			close(ours);
		ended("jump");
	}

	for (int restart = 1; restart >= 0; restart--) {
		sa.sa_flags = restart ? SA_RESTART : 0;
		sigaction(SIGUSR2, &sa, 0);
		connection();
		t = asleep(reader);
		pthread_kill(t, SIGUSR2);
		told("a handler closes", t);
		ended("a handler closes");
	}

	/* A child that is made meanwhile has no part of it. */
	connection();
	t = asleep(reader);
	close(ours);
	pid_t child = fork();
	if (!child) {
		pause();
		_exit(0);
	}
	send(theirs, "x", 1, 0);
	told("fork", t);
	ended("fork");
	kill(child, SIGKILL);
	waitpid(child, 0, 0);
	return 0;
}
