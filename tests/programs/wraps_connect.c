/* A library as images preload them: it wraps `connect`, and appends to /tmp/next which library it calls for that. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

int connect(int fd, const struct sockaddr *to, socklen_t length) {
    int (*next)(int, const struct sockaddr *, socklen_t) = dlsym(RTLD_NEXT, "connect");
    Dl_info is;
    if (dladdr((void *)next, &is)) {
        int log = open("/tmp/next", O_WRONLY | O_CREAT | O_APPEND, 0600);
        if (log >= 0) {
            (void)!write(log, is.dli_fname, strlen(is.dli_fname));
            (void)!write(log, "\n", 1);
            close(log);
        }
    }
    return next(fd, to, length);
}
