/* A library whose `posix_spawn` takes its time before there is a child. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <spawn.h>
#include <time.h>

typedef int spawn(pid_t *, const char *, const posix_spawn_file_actions_t *, const posix_spawnattr_t *, char *const[], char *const[]);

int posix_spawn(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions, const posix_spawnattr_t *how, char *const argv[],
                char *const envp[]) {
    struct timespec t = {0, 800000000};
    nanosleep(&t, 0);
    return ((spawn *)dlsym(dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD), "posix_spawn"))(pid, path, actions, how, argv, envp);
}
