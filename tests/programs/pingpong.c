/* Two threads and one connection, for programs built with a sanitizer: many small messages each way. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { ROUNDS = 4000, SIZE = 1000 };

static void must(int ok, const char *what) {
    if (!ok) {
        perror(what);
        exit(1);
    }
}

static void exactly(int fd, char *p, size_t n) {
    while (n > 0) {
        ssize_t k = recv(fd, p, n, 0);
        must(k > 0, "recv");
        p += k;
        n -= (size_t)k;
    }
}

static void *echo(void *arg) {
    int s = accept(*(int *)arg, NULL, NULL);
    must(s >= 0, "accept");
    char *b = malloc(SIZE);
    for (int i = 0; i < ROUNDS; i++) {
        exactly(s, b, SIZE);
        must(send(s, b, SIZE, 0) == SIZE, "send");
    }
    free(b);
    close(s);
    return NULL;
}

int main(void) {
    int l = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof a;
    must(bind(l, (struct sockaddr *)&a, sizeof a) == 0, "bind");
    must(listen(l, 1) == 0, "listen");
    must(getsockname(l, (struct sockaddr *)&a, &n) == 0, "getsockname");
    pthread_t t;
    must(pthread_create(&t, NULL, echo, &l) == 0, "pthread_create");
    int c = socket(AF_INET, SOCK_STREAM, 0);
    must(connect(c, (struct sockaddr *)&a, sizeof a) == 0, "connect");
    char *out = malloc(SIZE), *in = malloc(SIZE);
    for (int i = 0; i < ROUNDS; i++) {
        memset(out, i, SIZE);
        must(send(c, out, SIZE, 0) == SIZE, "send");
        exactly(c, in, SIZE);
        must(memcmp(in, out, SIZE) == 0, "compare");
    }
    free(out);
    free(in);
    close(c);
    pthread_join(t, NULL);
    close(l);
    puts("done");
    return 0;
}
