/* asks ADDRESS PORT [PAUSE]: says PING to a Redis server on one connection, every 10 ms, or as often as it is told (ms), until
   the answer is another one. */
#include <arpa/inet.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

int main(int argc, char **argv) {
    struct sockaddr_in to = {.sin_family = AF_INET};
    int fd = socket(AF_INET, SOCK_STREAM, 0), port = 0;
    long pause = argc == 4 ? atol(argv[3]) : 10;
    if (argc < 3 || argc > 4 || inet_pton(AF_INET, argv[1], &to.sin_addr) != 1) return 2;
    for (const char *p = argv[2]; *p; p++) port = port * 10 + *p - '0';
    to.sin_port = htons((unsigned short)port);
    if (fd < 0 || connect(fd, (void *)&to, sizeof to)) return 3;
    for (;;) {
        char said[7];
        if (send(fd, "PING\r\n", 6, 0) != 6) return 4;
        if (recv(fd, said, 7, MSG_WAITALL) != 7 || memcmp(said, "+PONG\r\n", 7)) return 5;
        nanosleep(&(struct timespec){.tv_sec = pause / 1000, .tv_nsec = pause % 1000 * 1000000}, 0);
    }
}
