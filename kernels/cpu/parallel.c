#include "parallel.h"

#include <omp.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

void parallel_for(long items, int threads, item_fn fn, void *context) {
    if (threads > items) threads = (int)items;
    if (threads <= 1) {
        for (long i = 0; i < items; i++) fn(context, i, 0);
        return;
    }
    long next = 0;
#pragma omp parallel num_threads(threads)
    {
        int thread = omp_get_thread_num();
        for (long i; (i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < items;) fn(context, i, thread);
    }
}

static pthread_key_t arena_key;
static pthread_once_t arena_once = PTHREAD_ONCE_INIT;
static void create_key(void) { pthread_key_create(&arena_key, free); }

/* Grows only: releasing and faulting in megabytes of pages at each call would cost more than the kernels. */
void *scratch(size_t bytes) {
    pthread_once(&arena_once, create_key);
    size_t *arena = pthread_getspecific(arena_key);
    if (!arena || *arena < bytes) {
        free(arena);
        size_t size = (bytes + bytes / 2 + 64 + 4095) & ~(size_t)4095;
        arena = aligned_alloc(4096, size);
        if (!arena) abort();
        *arena = size - 64;
        pthread_setspecific(arena_key, arena);
    }
    return (char *)arena + 64;
}

void radixkv_advise_huge_pages(void *start, long bytes) {
#ifdef MADV_HUGEPAGE
    const uintptr_t page = 1 << 21;
    uintptr_t from = ((uintptr_t)start + page - 1) & ~(page - 1), to = ((uintptr_t)start + bytes) & ~(page - 1);
    if (from < to) madvise((void *)from, to - from, MADV_HUGEPAGE); /* only advice: failing costs a little speed */
#else
    (void)start, (void)bytes;
#endif
}
