/* Asks the kernel for matrix tiles, once for the process. */
#define _GNU_SOURCE
#include "matrix_tiles.h"

#if !MATRIX_TILES
int matrix_tiles(void) { return 0; }
#elif defined(EMULATE_TILES)
int matrix_tiles(void) { return 1; }
#else
#include <sys/syscall.h>
#include <unistd.h>

#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18

static int allowed;
__attribute__((constructor)) static void ask(void) { allowed = !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA); }
int matrix_tiles(void) { return allowed; }
#endif
