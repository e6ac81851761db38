/* One call moves no more bytes than the kernel lets it (MAX_RW_COUNT, 2 GiB less a page), whatever it is asked for.
 *
 *     most
 */
#define _GNU_SOURCE
#include "pairs.h"
#include <pthread.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#define MOST 0x7ffff000UL
#define ALL (3UL << 30)

static int from;
static unsigned long got;

static void *reader(void *unused) {
    char *p = malloc(1 << 20);
    ssize_t n;
    while ((n = recv(from, p, 1 << 20, 0)) > 0) got += n;
    NEED(n == 0);
    return unused;
}

int main(void) {
    int to;
    pthread_t t;
    dial(&to, &from);
    warm(to, from);
    char *p = mmap(0, ALL, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    NEED(p != MAP_FAILED);
    NEED(!pthread_create(&t, 0, reader, 0));
    struct iovec v[2] = {{p, ALL / 2}, {p, ALL / 2}};
    NEED(writev(to, v, 2) == MOST);
    NEED(!shutdown(to, SHUT_WR) && !pthread_join(t, 0));
    NEED(got == MOST);
    puts("result ok");
}
