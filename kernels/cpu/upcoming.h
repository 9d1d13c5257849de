/* Lines of memory that a thread reads soon, asked for a few at a time while it computes with others.

   A core can wait for few lines at once; asked for all together they hold up those that it needs now.  Asking for one brings two or three
   behind it along, if there is time between one request and the next. */
#pragma once
#include "gemm.h"

#define UPCOMING_LINES 1024 /* at most; a chunk that all rows share has 352 of them if heads are of 64 */
#define UPCOMING_STEP 192   /* bytes from one request to the next */

struct upcoming {
    long next, count;
    const char *lines[UPCOMING_LINES];
};

INLINE void fetch_upcoming(struct upcoming *u, long count) {
    long next = u->next, end = next + count < u->count ? next + count : u->count;
    for (; next < end; next++) FETCH(u->lines[next]);
    u->next = next;
}
