/* Preloaded behind the shim: makes system calls that come from the shim's own code fail, or do half of what
 * they were asked, now and then. A seccomp filter traps them by the address they are made from; the handler
 * of SIGSYS makes the call itself, from here, where the filter lets it pass, or answers with the error.
 *
 * INJECT: "number error every seed": every so many of these calls (by chance) fail with this error number;
 * error 0: they move at most half of their bytes. INJECT_LOG: a file to append "seen injected" to at exit. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

static unsigned long from, to; /* the shim's code */
static long number, error, every;
static atomic_ulong chance, seen, injected;

static long call(long n, long a, long b, long c, long d, long e, long f)
{
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    long r;
    __asm__ volatile("syscall"
                     : "=a"(r)
                     : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return r;
}

/* Calls that move bytes: a length in the third argument. */
static int has_length(long n)
{
    return n == SYS_read || n == SYS_write || n == SYS_sendto || n == SYS_recvfrom || n == SYS_pread64;
}

static void trapped(int sig, siginfo_t *info, void *context)
{
    (void)sig;
    (void)info;
    greg_t *r = ((ucontext_t *)context)->uc_mcontext.gregs;
    long n = r[REG_RAX], length = r[REG_RDX];
    unsigned long x = atomic_fetch_add(&chance, 0x9e3779b97f4a7c15UL) + 0x9e3779b97f4a7c15UL;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9UL;
    x = (x ^ x >> 27) * 0x94d049bb133111ebUL;
    atomic_fetch_add(&seen, 1);
    int now = (x ^ x >> 31) % every == 0;
    /* Only an epoll registration that is new needs memory. */
    if (n == SYS_epoll_ctl && error != EINTR && r[REG_RSI] != EPOLL_CTL_ADD)
        now = 0;
    if (now && error == 0 && has_length(n) && length > 1)
        length = (length + 1) / 2;
    else if (now && error == 0)
        now = 0;
    if (now)
        atomic_fetch_add(&injected, 1);
    /* Linux closes the descriptor whatever close() then says. */
    if (!now || error == 0 || n == SYS_close)
        r[REG_RAX] = call(n, r[REG_RDI], r[REG_RSI], length, r[REG_R10], r[REG_R8], r[REG_R9]);
    if (now && error != 0)
        r[REG_RAX] = -error;
}

static int find(struct dl_phdr_info *info, size_t size, void *data)
{
    (void)size;
    (void)data;
    if (!strstr(info->dlpi_name, "libunderpass.so"))
        return 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *p = &info->dlpi_phdr[i];
        if (p->p_type == PT_LOAD && p->p_flags & PF_X) {
            from = info->dlpi_addr + p->p_vaddr;
            to = from + p->p_memsz;
        }
    }
    return 1;
}

__attribute__((constructor)) static void begin(int argc, char **argv, char **envp)
{
    (void)argc;
    const char *spec = getenv("INJECT");
    unsigned long seed;
    if (!spec || sscanf(spec, "%ld %ld %ld %lu", &number, &error, &every, &seed) != 4 || every < 1)
        return;
    atomic_store(&chance, seed);
    dl_iterate_phdr(find, NULL);
    /* A filter compares 32 bits. Where the code lies across such a border, another run has it elsewhere. */
    if (from >> 32 != to >> 32)
        execve("/proc/self/exe", argv, envp);
    if (!from || from >> 32 != to >> 32) {
        fprintf(stderr, "inject: the shim's code is not where a filter can tell\n");
        exit(3);
    }
    struct sigaction sa = {.sa_sigaction = trapped, .sa_flags = SA_SIGINFO | SA_RESTART | SA_NODEFER};
    sigaction(SIGSYS, &sa, NULL);
    const unsigned ip = offsetof(struct seccomp_data, instruction_pointer);
    struct sock_filter f[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 6),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, ip + 4),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, from >> 32, 0, 4),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, ip),
        BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, (unsigned)from, 0, 2),
        BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, (unsigned)to, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog p = {sizeof f / sizeof *f, f};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &p)) {
        perror("inject: seccomp");
        exit(3);
    }
}

__attribute__((destructor)) static void end(void)
{
    const char *log = getenv("INJECT_LOG");
    char line[64];
    if (!log || atomic_load(&seen) == 0)
        return;
    int n = snprintf(line, sizeof line, "%lu %lu\n", atomic_load(&seen), atomic_load(&injected));
    int fd = call(SYS_open, (long)log, O_WRONLY | O_CREAT | O_APPEND, 0644, 0, 0, 0);
    if (fd >= 0) {
        call(SYS_write, fd, (long)line, n, 0, 0, 0);
        call(SYS_close, fd, 0, 0, 0, 0, 0);
    }
}
