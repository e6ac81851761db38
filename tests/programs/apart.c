// Holds a listener and connections to it in a network namespace of its own, until it is killed:
// apart CONNECTIONS
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <net/if.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#define must(x) do { if ((x) < 0) { perror(#x); return 1; } } while (0)

int main(int argc, char **argv)
{
    int n = argc > 1 ? atoi(argv[1]) : 1;
    must(unshare(CLONE_NEWNET));
    int s = socket(AF_INET, SOCK_DGRAM, 0);
    struct ifreq lo = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    must(ioctl(s, SIOCSIFFLAGS, &lo));
    close(s);
    int l = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(4000)};
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    must(bind(l, (struct sockaddr *)&at, sizeof at));
    must(listen(l, n));
    for (int i = 0; i < n; i++) {
        int c = socket(AF_INET, SOCK_STREAM, 0);
        must(connect(c, (struct sockaddr *)&at, sizeof at));
        int a = accept(l, NULL, NULL);
        must(a);
        char b = 'x';
        must(send(c, &b, 1, 0));
        must(recv(a, &b, 1, 0));
    }
    puts("ready");
    fflush(stdout);
    pause();
    return 0;
}
