/* A sorted table of ids of 32 bytes, and searches in it.

   `count` and `find` trust addresses and lengths, and nothing else: whatever bytes the ids have,
   they write only where they were told to.  An id's bucket is its first bits; where each bucket
   begins is in `starts`, with the number of all rows at the end. */

#include "lanes.h"

#define PASS int mstore_pass(void *returned, void *raised,

enum {
    WORDS = 4, /* of eight bytes, in an id */
    FEW = 16,  /* rows of a bucket that are looked at one after the other */
    AHEAD = 24 /* a search's memory is asked for while so many others run */
};

/* Ids lie at any address. */
typedef u64 Word __attribute__((aligned(1), may_alias));
typedef struct {
    Word word[WORDS];
} Id;

INLINE u64 leading(const Id *id) { return __builtin_bswap64(id->word[0]); }

INLINE i64 bucket(const Id *id, i64 bits) { return (i64)(leading(id) >> (64 - bits)); }

INLINE int is_less(const Id *a, const Id *b) {
    for (int i = 0; i < WORDS; i++)
        if (a->word[i] != b->word[i])
            return __builtin_bswap64(a->word[i]) < __builtin_bswap64(b->word[i]);
    return 0;
}

INLINE int is_same(const Id *a, const Id *b) {
    u64 other = 0;
    for (int i = 0; i < WORDS; i++)
        other |= a->word[i] ^ b->word[i];
    return !other;
}

INLINE i64 found(const Id *id, const Id *table, i64 low, i64 high) {
    while (high - low > FEW) {
        i64 middle = low + (high - low) / 2;
        if (is_less(table + middle, id))
            low = middle + 1;
        else
            high = middle + 1;
    }
    for (; low < high; low++)
        if (is_same(table + low, id)) return low;
    return -1;
}

#if defined(COUNT)
/* Tell where each bucket begins, and whether each id is less than the next. */
PASS i64 rows, i64 bits, const Id *table, int32_t *starts, i64 *is_ascending) {
    i64 next = 0, buckets = (i64)1 << bits;
    *is_ascending = 1;
    for (i64 row = 0; row < rows; row++) {
        for (i64 own = bucket(table + row, bits); next <= own; next++)
            starts[next] = (int32_t)row;
        if (row && !is_less(table + row - 1, table + row)) *is_ascending = 0;
    }
    for (; next <= buckets; next++)
        starts[next] = (int32_t)rows;
    return 0;
}
#endif

#if defined(FIND)
/* Tell the row of each id; -1 if it has none. */
PASS i64 ids, i64 bits, const Id *asked, const Id *table, const int32_t *starts, i64 *rows) {
    for (i64 i = 0; i < ids + 2 * AHEAD; i++) {
        i64 later = i - AHEAD, now = later - AHEAD;
        if (i < ids) __builtin_prefetch(starts + bucket(asked + i, bits));
        if (later >= 0 && later < ids) {
            const int32_t *own = starts + bucket(asked + later, bits);
            for (i64 row = own[0]; row < own[1] && row < own[0] + FEW; row += 2)
                __builtin_prefetch(table + row);
        }
        if (now >= 0) {
            const int32_t *own = starts + bucket(asked + now, bits);
            rows[now] = found(asked + now, table, own[0], own[1]);
        }
    }
    return 0;
}
#endif
