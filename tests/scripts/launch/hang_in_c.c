/* Calls that do not return for a while, whatever signals arrive. */
#define _GNU_SOURCE
#include <sys/wait.h>
#include <unistd.h>

void hang_in_sleep(unsigned seconds) {
    while (seconds > 0) seconds = sleep(seconds);
}

/* The caller waits in the kernel, uninterruptibly on most releases of it, until the child ends. */
void hang_in_vfork(unsigned seconds) {
    if (vfork() == 0) {
        sleep(seconds);
        _exit(0);
    }
}
