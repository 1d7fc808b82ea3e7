"""Makes the files below a path fail for a while, in a program and its worker processes."""

import os
import subprocess
from pathlib import Path

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* Each process fails from the tenth access to a path that contains OUTAGE_PATH on, for OUTAGE_S
   seconds, as if a network disk had been unmounted. */
static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec + at.tv_nsec * 1e-9;
}

static int fails(const char *path) {
    static int seen;
    static double began;
    const char *affected = getenv("OUTAGE_PATH");
    if (!affected || !path || !strstr(path, affected) || ++seen < 10)
        return 0;
    if (!began)
        began = now();
    if (now() - began > atof(getenv("OUTAGE_S")))
        return 0;
    errno = ESTALE;
    return 1;
}

static int file_fails(int file) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0)
        return 0;
    path[size] = 0;
    return fails(path);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define OPEN(name)                                         \
    int name(const char *path, int flags, ...) {           \
        va_list more;                                      \
        va_start(more, flags);                             \
        int mode = va_arg(more, int);                      \
        va_end(more);                                      \
        return fails(path) ? -1 : REAL(name)(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

int stat(const char *path, struct stat *about) {
    return fails(path) ? -1 : REAL(stat)(path, about);
}
int stat64(const char *path, struct stat64 *about) {
    return fails(path) ? -1 : REAL(stat64)(path, about);
}
ssize_t read(int file, void *to, size_t size) {
    return file_fails(file) ? -1 : REAL(read)(file, to, size);
}
ssize_t pread64(int file, void *to, size_t size, off64_t at) {
    return file_fails(file) ? -1 : REAL(pread64)(file, to, size, at);
}
ssize_t pread(int file, void *to, size_t size, off_t at) {
    return file_fails(file) ? -1 : REAL(pread)(file, to, size, at);
}
"""


def build(folder: Path) -> Path:
    """Compiles the stand-in; returns the library to preload."""
    source, library = folder / "outage.c", folder / "outage.so"
    source.write_text(_SOURCE)
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", "-w", "-o", str(library), str(source), "-ldl"], check=True
    )
    return library


def variables(library: Path, path: str, seconds: float) -> dict[str, str]:
    """Returns the environment variables of a program whose disk fails.

    Args:
        path: part of the paths that are affected.
        seconds: how long each process sees the outage.
    """
    return {"LD_PRELOAD": str(library), "OUTAGE_PATH": path, "OUTAGE_S": str(seconds)}


def wait_for(folder: Path, seconds: float) -> dict[str, str]:
    """Returns the environment variables of a program that waits for a disk so long."""
    (folder / "sitecustomize.py").write_text(
        f"from jaxtrain.storage import disks\n\ndisks.OUTAGE_S = {seconds}\n"
    )
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).parents[2])])}
