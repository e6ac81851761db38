/* A program that waits for room with select, sends until it is refused, and tries once more (iperf3's client): it just
 * waits, and its connection stays on its lane however slowly the reader takes what is there.
 *
 *     tries
 */
#define _GNU_SOURCE
#include "pairs.h"
#include <pthread.h>
#include <sys/select.h>

enum { ALL = 400000, PIECE = 20000 };

static int a, b;

static void *reader(void *none) {
    static char some[1024];
    for (long at = 0; at < ALL;) {
        ssize_t n = recv(b, some, sizeof some, 0);
        NEED(n > 0);
        for (ssize_t k = 0; k < n; k++) NEED(some[k] == (char)((at + k) % PIECE % 251));
        at += n;
        sleep_us(5000);
    }
    return none;
}

int main(void) {
    static char piece[PIECE];
    for (int k = 0; k < PIECE; k++) piece[k] = (char)(k % 251);
    dial(&a, &b);
    warm(a, b);
    unsigned long before = info(b).tcpi_bytes_received;
    pthread_t t;
    NEED(!pthread_create(&t, 0, reader, 0));
    for (long at = 0; at < ALL;) {
        fd_set read, write;
        FD_ZERO(&read);
        FD_ZERO(&write);
        FD_SET(listener, &read);
        FD_SET(a, &write);
        NEED(select((a > listener ? a : listener) + 1, &read, &write, 0, 0) == 1);
        for (int refused = 0; refused < 2 && at < ALL;) {
            long left = PIECE - at % PIECE;
            ssize_t n = send(a, piece + at % PIECE, left, MSG_DONTWAIT);
            NEED(n > 0 || errno == EAGAIN);
            if (n < 0) refused++;
            else at += n;
        }
    }
    NEED(!pthread_join(t, 0));
    unsigned long passed = info(b).tcpi_bytes_received - before;
    fprintf(stderr, "%lu bytes by TCP\n", passed);
    if (getenv("LD_PRELOAD")) NEED(passed < ALL / 4);
    puts("result ok");
}
