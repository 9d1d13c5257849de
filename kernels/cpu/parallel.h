/* Work items shared by threads, and memory for them. */
#pragma once
#include <stddef.h>

typedef void (*item_fn)(void *context, long item, int thread);

/* Runs fn(context, item, thread) for items 0 .. items-1, handed out in order to whichever of `threads` threads is free. */
void parallel_for(long items, int threads, item_fn fn, void *context);

/* Each thread calls `fn` when it has done its items of a loop. */
void after_loops(void (*fn)(void));

/* At least `bytes` of memory aligned to 64 bytes, kept by the calling thread until its next call or its end. */
void *scratch(size_t bytes);

/* Asks for huge pages where [start, start + bytes) is still untouched: K/V is read a page here and a page there. */
void radixkv_advise_huge_pages(void *start, long bytes);
