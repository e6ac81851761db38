/* A program that keeps books on its mappings, as UCX and Open MPI do: it writes jumps to functions of its own over the
 * beginnings of the C library's, as it finds them, and these do the calls by number. Memory that is taken away so is
 * as unreadable for a send as ever, and the connection keeps its lane. */
#define _GNU_SOURCE
#include "pairs.h"
#include <dlfcn.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/shm.h>

#define PAGE 4096ul

static int seen;

static int own_munmap(void *p, size_t n) {
    seen++;
    return syscall(SYS_munmap, p, n);
}

static int own_mprotect(void *p, size_t n, int prot) {
    seen++;
    return syscall(SYS_mprotect, p, n, prot);
}

static int own_pkey_mprotect(void *p, size_t n, int prot, int key) {
    seen++;
    return syscall(SYS_pkey_mprotect, p, n, prot, key);
}

static int own_shmdt(const void *p) {
    seen++;
    return syscall(SYS_shmdt, p);
}

static void *own_mremap(void *p, size_t old, size_t new, int flags, void *to) {
    seen++;
    return (void *)syscall(SYS_mremap, p, old, new, flags, to);
}

/* movabs $with, %r11; jmp *%r11 */
static void patch(const char *name, void *with) {
    unsigned char *code = dlsym(RTLD_DEFAULT, name), jump[13] = {0x49, 0xbb, [10] = 0x41, 0xff, 0xe3};
    NEED(code);
    memcpy(jump + 2, &with, 8);
    char *page = (char *)((uintptr_t)code & -PAGE);
    /* (By number: by name it is a jump already when its turn has come.) */
    NEED(!syscall(SYS_mprotect, page, 2 * PAGE, PROT_READ | PROT_WRITE | PROT_EXEC));
    memcpy(code, jump, sizeof jump);
    NEED(!syscall(SYS_mprotect, page, 2 * PAGE, PROT_READ | PROT_EXEC));
}

static int a, b;

/* A page that has been sent from. */
static char *sent(void) {
    char *p = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), got[8];
    NEED(p != MAP_FAILED);
    memcpy(p, "payload", 8);
    NEED(send(a, p, 8, 0) == 8 && recv(b, got, 8, MSG_WAITALL) == 8 && !memcmp(p, got, 8));
    return p;
}

static void gone(const char *p) { NEED(send(a, p, 8, 0) == -1 && errno == EFAULT); }

/* Each function comes by once. */
static void all(void) {
    seen = 0;
    char *p = sent();
    NEED(!munmap(p, PAGE) && seen == 1);
    gone(p);
    NEED(!mprotect(p = sent(), PAGE, PROT_NONE) && seen == 2);
    gone(p);
    NEED(!pkey_mprotect(p = sent(), PAGE, PROT_NONE, -1) && seen == 3);
    gone(p);
    char *to = mmap(0, PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    NEED(mremap(p = sent(), PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to && seen == 4 && !strcmp(to, "payload"));
    gone(p);
    int id = shmget(IPC_PRIVATE, PAGE, 0600);
    NEED(id >= 0 && (p = shmat(id, 0, 0)) != (char *)-1 && !shmctl(id, IPC_RMID, 0));
    char got[8];
    NEED(send(a, p, 8, 0) == 8 && recv(b, got, 8, MSG_WAITALL) == 8);
    NEED(!shmdt(p) && seen == 5);
    gone(p);
    NEED(munmap((void *)1, PAGE) == -1 && errno == EINVAL && seen == 6);
}

int main(void) {
    dial(&a, &b);
    warm(a, b);
    patch("munmap", own_munmap);
    patch("mprotect", own_mprotect);
    patch("pkey_mprotect", own_pkey_mprotect);
    patch("mremap", own_mremap);
    patch("shmdt", own_shmdt);
    for (int k = 0; k < 10; k++) all();
    NEED(by_lane(a, b) || !getenv("LD_PRELOAD"));
    puts("result ok");
}
