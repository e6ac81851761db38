/* A handler that runs before each fork closes connections, when the fork has begun for the shim, and there is no child yet.
 *
 *     prepared ROUNDS FILE      prints "closed", and ends when there is such a file
 */
#include <pthread.h>
#include <sys/wait.h>

#include "pairs.h"

static int a, b;

static void closes(void) { NEED(!close(a) && !close(b)); }

int main(int argc, char **argv) {
    int status;
    NEED(argc == 3 && !pthread_atfork(closes, 0, 0));
    for (int k = atoi(argv[1]); k > 0; k--) {
        dial(&a, &b);
        warm(a, b);
        pid_t child = fork();
        if (!child) _exit(0);
        NEED(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    }
    puts("closed");
    fflush(stdout);
    while (access(argv[2], F_OK)) sleep_us(10000);
    puts("result ok");
}
