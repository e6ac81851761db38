/* A program spawned by posix_spawn, posix_spawnp, pidfd_spawn and pidfd_spawnp reads, without a shim, what its parent has on
 * its lane; then the parent goes on with the connection, and it comes onto a lane again.
 *
 *     spawned with       the C library, or one that is linked, has them all
 *     spawned without    it may lack those with a pidfd: a program that looks for them finds nothing, or ENOSYS
 */
#define _GNU_SOURCE
#include "pairs.h"
#include <dlfcn.h>
#include <spawn.h>
#include <sys/wait.h>

enum { AMOUNT = 2000 };

typedef int spawn(int *, const char *, const posix_spawn_file_actions_t *, const posix_spawnattr_t *, char *const[], char *const[]);

static spawn *find(const char *name) { return (spawn *)dlsym(RTLD_DEFAULT, name); }

static void spawned_by(const char *name) {
    int a, b, id;
    char buf[AMOUNT], of[16], *argv[] = {"spawned", "take", of, 0};
    siginfo_t end = {0};
    dial(&a, &b);
    warm(a, b);
    for (int i = 0; i < AMOUNT; i++) buf[i] = (char)i;
    NEED(send(b, buf, AMOUNT, 0) == AMOUNT);
    sprintf(of, "%d", a);
    NEED(!find(name)(&id, "/proc/self/exe", 0, 0, argv, (char *[]){0}));
    NEED(!waitid(strncmp(name, "pidfd", 5) ? P_PID : P_PIDFD, (id_t)id, &end, WEXITED));
    NEED(end.si_code == CLD_EXITED && end.si_status == 0);
    warm(a, b);
    close(a), close(b);
}

int main(int argc, char **argv) {
    if (argc == 3 && !strcmp(argv[1], "take")) return take_counted(atoi(argv[2]), AMOUNT);
    NEED(argc == 2);
    spawned_by("posix_spawn");
    spawned_by("posix_spawnp");
    /* A call that fails leaves the number of the process alone. */
    NEED(find("posix_spawn")((int *)8, "/nonexistent", 0, 0, (char *[]){0}, (char *[]){0}) == ENOENT);
    for (int k = 0; k < 2; k++) {
        const char *name = k ? "pidfd_spawnp" : "pidfd_spawn";
        char *none[] = {0};
        int id = -7;
        if (!strcmp(argv[1], "with")) {
            spawned_by(name);
            NEED(!find(name)(0, "/bin/true", 0, 0, none, none)); /* nobody wants to know which one */
        }
        else if (find(name)) {
            int e = find(name)(&id, "/bin/true", 0, 0, none, none);
            NEED(e == (id == -7 ? ENOSYS : 0));
        }
    }
    puts("result ok");
}
