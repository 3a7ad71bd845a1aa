/* Makes writes and fsyncs below $SLOW_DIR as slow as a disk of $SLOW_MB_PER_S with $SLOW_MS for each fsync. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static int is_slow(int fd) {
    const char *dir = getenv("SLOW_DIR");
    char link[64], path[4096];
    if (dir == NULL) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return strncmp(path, dir, strlen(dir)) == 0;
}

static void wait_seconds(double seconds) {
    struct timespec t = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&t, NULL);
}

static void pay(int fd, ssize_t bytes) {
    const char *rate = getenv("SLOW_MB_PER_S");
    if (bytes > 0 && rate != NULL && is_slow(fd)) wait_seconds((double)bytes / (atof(rate) * 1e6));
}

ssize_t pwrite64(int fd, const void *data, size_t n, off_t at) {
    static ssize_t (*real)(int, const void *, size_t, off_t);
    if (!real) real = dlsym(RTLD_NEXT, "pwrite64");
    ssize_t done = real(fd, data, n, at);
    pay(fd, done);
    return done;
}

ssize_t pwrite(int fd, const void *data, size_t n, off_t at) { return pwrite64(fd, data, n, at); }

ssize_t write(int fd, const void *data, size_t n) {
    static ssize_t (*real)(int, const void *, size_t);
    if (!real) real = dlsym(RTLD_NEXT, "write");
    ssize_t done = real(fd, data, n);
    pay(fd, done);
    return done;
}

int fsync(int fd) {
    static int (*real)(int);
    const char *ms = getenv("SLOW_MS");
    if (!real) real = dlsym(RTLD_NEXT, "fsync");
    if (ms != NULL && is_slow(fd)) wait_seconds(atof(ms) / 1e3);
    return real(fd);
}
