/* Asks the kernel for matrix tiles, once for the process, and gives a thread's back when it has done with a loop. */
#define _GNU_SOURCE
#include "matrix_tiles.h"

#include "parallel.h"

__thread long tiles_configured;

#if !MATRIX_TILES
int matrix_tiles(void) { return 0; }
#else
static int allowed;
int matrix_tiles(void) { return allowed; }

static void give_back(void) {
    if (tiles_configured) tile_release();
    tiles_configured = 0;
}

#ifdef EMULATE_TILES
static int ask(void) { return 1; }
#else
#include <sys/syscall.h>
#include <unistd.h>

#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18

static int ask(void) { return !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA); }
#endif

__attribute__((constructor)) static void begin(void) {
    allowed = ask();
    if (allowed) after_loops(give_back);
}
#endif
