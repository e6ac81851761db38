/* A child that accepts, and installs a seccomp filter which allows little but receiving and sending: before it
   serves, or in the middle. Bare it goes on, whatever the filter does to other calls.

       sandboxed strict | kill | trap | error | allow   before | after

   `allow` forbids only what nobody needs: the connection stays where it is. Prints "result ok". */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <netinet/tcp.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { WARM = 4000, ROUNDS = 3000, BIG = 300000 };

static void must(int ok, const char *what) {
	if (!ok) {
		fprintf(stderr, "%d: %s: %s\n", getpid(), what, strerror(errno));
		_exit(1);
	}
}

static void all(int fd, char *buf, size_t n, int out) {
	for (size_t at = 0; at < n;) {
		ssize_t r = out ? write(fd, buf + at, n - at) : read(fd, buf + at, n - at);
		must(r > 0, out ? "write" : "read");
		at += (size_t)r;
	}
}

static void sandbox(const char *how) {
	static const int needed[] = {SYS_read, SYS_write, SYS_exit, SYS_exit_group, SYS_rt_sigreturn};
	struct sock_filter f[32];
	struct sock_fprog p = {0, f};
	int allow = !strcmp(how, "allow");
	unsigned no = !strcmp(how, "kill")   ? SECCOMP_RET_KILL_PROCESS
	              : !strcmp(how, "trap") ? SECCOMP_RET_TRAP
	                                     : SECCOMP_RET_ERRNO | EPERM;
	if (!strcmp(how, "strict")) {
		must(!prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT), "strict");
		return;
	}
	f[p.len++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
	if (allow) {
		f[p.len++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_reboot, 0, 1);
		f[p.len++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, no);
		f[p.len++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	}
	for (size_t k = 0; !allow && k < sizeof needed / sizeof *needed; k++) {
		f[p.len++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, needed[k], 0, 1);
		f[p.len++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	}
	if (!allow)
		f[p.len++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, no);
	must(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges");
	if (!strcmp(how, "trap")) /* either way to install it */
		must(!prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &p), "prctl");
	else
		must(!syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &p), "seccomp");
}

static void serve(int listener, const char *how, int before) {
	static char buf[BIG];
	int fd = accept(listener, 0, 0), on = 1;
	must(fd >= 0, "accept");
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
	if (before)
		sandbox(how);
	for (int k = 0; k < WARM + ROUNDS; k++) {
		if (k == WARM && !before)
			sandbox(how);
		all(fd, buf, 64, 0);
		all(fd, buf, 64, 1);
	}
	all(fd, buf, BIG, 0);
	all(fd, buf, BIG, 1);
	syscall(SYS_exit, 0);
}

int main(int argc, char **argv) {
	static char out[BIG], in[BIG];
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
	socklen_t n = sizeof a;
	int listener = socket(AF_INET, SOCK_STREAM, 0), on = 1, status;
	must(argc == 3, "usage");
	must(!bind(listener, (void *)&a, n) && !listen(listener, 5) && !getsockname(listener, (void *)&a, &n), "listen");
	pid_t child = fork();
	if (!child)
		serve(listener, argv[1], !strcmp(argv[2], "before"));
	close(listener);
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	must(!connect(fd, (void *)&a, sizeof a), "connect");
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
	for (int k = 0; k < WARM + ROUNDS; k++) {
		memset(out, k, 64);
		all(fd, out, 64, 1);
		all(fd, in, 64, 0);
		must(!memcmp(in, out, 64), "other bytes");
		if (k % 100 == 0)
			usleep(2000); /* for the daemon */
	}
	for (int k = 0; k < BIG; k++)
		out[k] = (char)(k * 7 + k / 251);
	all(fd, out, BIG, 1);
	all(fd, in, BIG, 0);
	must(!memcmp(in, out, BIG), "other bytes");
	must(read(fd, in, 1) == 0, "the end");
	must(waitpid(child, &status, 0) == child && status == 0, "the child");
	puts("result ok");
	return 0;
}
