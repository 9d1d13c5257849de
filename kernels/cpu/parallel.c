/* A thread pool that never waits for a thread to start: the caller works too, takes what is left, and waits only for items that others
   have begun.  OpenMP waits for every thread in every loop, so that on a machine with anything else to do each loop can cost a time
   slice; a decode step has hundreds of loops. */
#define _GNU_SOURCE
#include "parallel.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#define SPIN_NS 50000 /* an idle worker looks for work this long, about the time between two kernels, before it sleeps */

/* The gate: whether a job is open to helpers, how many are inside, and the job's number above. */
#define INSIDE 0xffffu
#define OPEN 0x10000u
#define JOB 0x20000u

#define MAX_SHARES 64

static struct {
    pthread_mutex_t owner; /* held by the caller whose job it is */
    pthread_mutex_t lock;  /* for sleeping */
    pthread_cond_t wake;
    uint64_t gate;
    int sleeping, workers;
    item_fn fn; /* of the present job, as are these */
    void *context;
    long items;
    int threads;
    /* Each thread's share of the items, neighbours: a thread meets the same rows in one operation after the other, and finds them in its own
       caches.  Who is done with his own takes from the others'. */
    struct share {
        long next;
        char apart[64 - sizeof(long)];
    } shares[MAX_SHARES];
} pool = {.owner = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static void nothing(void) {}
static void (*done)(void) = nothing;
void after_loops(void (*fn)(void)) { done = fn; }

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int share_count(int threads) { return threads < MAX_SHARES ? threads : MAX_SHARES; }
static long share_start(int share, int shares) { return pool.items * share / shares; }

static void run_items(int thread) {
    int shares = share_count(pool.threads);
    for (int s = 0; s < shares; s++) {
        int of = (thread + s) % shares;
        long end = share_start(of + 1, shares), i;
        while ((i = __atomic_fetch_add(&pool.shares[of].next, 1, __ATOMIC_RELAXED)) < end) pool.fn(pool.context, i, thread);
    }
    done();
}

/* A gate that is open for a job this worker hasn't seen; spins, then sleeps, until there is one. */
static uint64_t wait_for_job(uint64_t seen) {
    uint64_t gate, deadline = now_ns() + SPIN_NS;
    do
        for (int i = 0; i < 64; i++) {
            gate = __atomic_load_n(&pool.gate, __ATOMIC_ACQUIRE);
            if (gate & OPEN && gate / JOB != seen) return gate;
            relax();
        }
    while (now_ns() < deadline);
    pthread_mutex_lock(&pool.lock);
    __atomic_fetch_add(&pool.sleeping, 1, __ATOMIC_SEQ_CST);
    while (gate = __atomic_load_n(&pool.gate, __ATOMIC_SEQ_CST), !(gate & OPEN) || gate / JOB == seen) pthread_cond_wait(&pool.wake, &pool.lock);
    __atomic_fetch_sub(&pool.sleeping, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&pool.lock);
    return gate;
}

static void *work(void *argument) {
    int thread = (int)(intptr_t)argument;
    uint64_t seen = 0;
    for (;;) {
        uint64_t gate = wait_for_job(seen);
        if (!__atomic_compare_exchange_n(&pool.gate, &gate, gate + 1, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) continue;
        seen = gate / JOB;
        if (thread < pool.threads) run_items(thread);
        __atomic_fetch_sub(&pool.gate, 1, __ATOMIC_RELEASE);
    }
    return 0;
}

static void forget_workers(void) { /* a forked child has none */
    pthread_mutex_init(&pool.owner, 0);
    pthread_mutex_init(&pool.lock, 0);
    pthread_cond_init(&pool.wake, 0);
    pool.gate &= ~(uint64_t)(INSIDE | OPEN);
    pool.sleeping = pool.workers = 0;
}

static void hire(int workers) {
    static int registered;
    if (!registered) pthread_atfork(0, 0, forget_workers);
    registered = 1;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before); /* signals are for the program's own threads */
    for (pthread_t id; pool.workers < workers; pool.workers++) {
        if (pthread_create(&id, 0, work, (void *)(intptr_t)(pool.workers + 1))) break; /* the others do without */
        pthread_detach(id);
    }
    pthread_sigmask(SIG_SETMASK, &before, 0);
}

void parallel_for(long items, int threads, item_fn fn, void *context) {
    if (threads > items) threads = (int)items;
    /* A second caller at the same time does without help. */
    if (threads <= 1 || pthread_mutex_trylock(&pool.owner)) {
        for (long i = 0; i < items; i++) fn(context, i, 0);
        done();
        return;
    }
    if (pool.workers < threads - 1) hire(threads - 1);
    pool.fn = fn, pool.context = context, pool.items = items, pool.threads = threads;
    for (int s = 0; s < share_count(threads); s++) pool.shares[s].next = share_start(s, share_count(threads));
    uint64_t job = __atomic_load_n(&pool.gate, __ATOMIC_RELAXED) / JOB + 1;
    __atomic_store_n(&pool.gate, job * JOB + OPEN, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&pool.sleeping, __ATOMIC_SEQ_CST)) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
    run_items(0);
    __atomic_fetch_and(&pool.gate, ~(uint64_t)OPEN, __ATOMIC_ACQ_REL);
    for (long spins = 0; __atomic_load_n(&pool.gate, __ATOMIC_ACQUIRE) & INSIDE; spins++) {
        if (spins < 1000) relax();
        else sched_yield(); /* its thread may be waiting for this CPU */
    }
    pthread_mutex_unlock(&pool.owner);
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
