/* A library with what glibc has since 2.39: `pidfd_spawn`, `pidfd_spawnp`, `pidfd_getpid`. Like that one's, their insides
 * are seen by no shim. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>

#include "raw.h"

typedef int spawn(pid_t *, const char *, const posix_spawn_file_actions_t *, const posix_spawnattr_t *, char *const[], char *const[]);

static int spawned(const char *by, int *pidfd, const char *path, const posix_spawn_file_actions_t *actions, const posix_spawnattr_t *how,
                   char *const argv[], char *const envp[]) {
    pid_t pid;
    spawn *native = (spawn *)dlsym(dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD), by);
    int e = native(&pid, path, actions, how, argv, envp);
    if (!e && pidfd) *pidfd = (int)raw(SYS_pidfd_open, pid, 0, 0, 0, 0);
    return e;
}

int pidfd_spawn(int *pidfd, const char *path, const posix_spawn_file_actions_t *actions, const posix_spawnattr_t *how, char *const argv[],
                char *const envp[]) {
    return spawned("posix_spawn", pidfd, path, actions, how, argv, envp);
}

int pidfd_spawnp(int *pidfd, const char *file, const posix_spawn_file_actions_t *actions, const posix_spawnattr_t *how, char *const argv[],
                 char *const envp[]) {
    return spawned("posix_spawnp", pidfd, file, actions, how, argv, envp);
}

int pidfd_getpid(int pidfd) {
    char path[40], text[500] = "";
    int pid = -1;
    sprintf(path, "/proc/self/fdinfo/%d", pidfd);
    int fd = (int)raw(SYS_openat, AT_FDCWD, (long)path, O_RDONLY, 0, 0);
    raw(SYS_read, fd, (long)text, sizeof text - 1, 0, 0);
    raw(SYS_close, fd, 0, 0, 0, 0);
    const char *at = strstr(text, "\nPid:");
    if (at) sscanf(at, "\nPid: %d", &pid);
    return pid;
}
