/* Which elements of rows are kept, where the chance of each follows from its rank in the row.

   Few draws lie between the lowest and the highest limit of the ranks; all others decide alone.
   For these few, sizes are counted in buckets, which tells the ranks of each bucket, and most of
   these draws are not between the limits of those.  What is left is compared with the elements of
   its bucket.

   Which way a row takes changes its time, and no bit.  Nothing here checks an address. */

#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))
#define COPY __builtin_memcpy
#define FILL __builtin_memset

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int64_t i64;

enum {
    ABS = 0x7fffffff,
    INFINITE = 0x7f800000,
    NOT_A_NUMBER = 0x7fc00000,
    SIZE_BITS = 31,
    OCTAVE_BITS = 4, /* buckets are parts of the 16 octaves below the largest size */
    ZEROS = 8,       /* places that zeros, which may be most of a row, are counted at in turn */
    FEW = 32,        /* so many comparisons for each element take less time than a sort */
    DIGIT = 11,      /* bits of a size that the sort takes at a time */
    DIGITS = 3,
    BINS = 1 << DIGIT,
    LANES = 16,
    WORD = 64
};

typedef u32 Lanes __attribute__((ext_vector_type(LANES)));
typedef _Bool Bits __attribute__((ext_vector_type(LANES)));

/* The lowest rank of a bucket, and how many it has beyond that.  by_zeros: all ones for a place of
   zeros, whose ranks are in their order; else 0. */
typedef struct {
    u32 rank, more, by_zeros, _;
} Bucket;

/* A row, and its scratch memory. */
typedef struct {
    i64 length;
    u32 buckets;
    const u64 *limits; /* of draws, by rank */
    const u32 *draws;
    u32 *sizes, *bucket; /* of each element */
    u64 *open;           /* elements that are not decided; in the upper half, the zeros before */
    u64 *order;          /* sizes, each with its place below it */
    Bucket *table;
    u32 *counters;
    u8 *kept;
} Row;

/* Write which draws are below all limits. */
INLINE void keep_below(const Row *row) {
    u64 least = row->limits[0];
    if (least >> 32)
        FILL(row->kept, 1, row->length);
    else
        for (i64 i = 0; i < row->length; i++)
            row->kept[i] = row->draws[i] < (u32)least;
}

/* Write the bits of magnitudes, of which any NaN is the largest; return the largest. */
INLINE u32 measure(const Row *row, const u32 *values) {
    u32 top = 0;
    for (i64 i = 0; i < row->length; i++) {
        u32 size = values[i] & ABS;
        size = size > INFINITE ? NOT_A_NUMBER : size;
        row->sizes[i] = size;
        top = size > top ? size : top;
    }
    return top;
}

/* Write the bucket of each element: the first one takes all that are smaller, too. */
INLINE void choose(const Row *row, u32 top, int shift) {
    int32_t first = (int32_t)(top >> shift) - (int32_t)(row->buckets - 1);
    for (i64 i = 0; i < row->length; i++) {
        u32 size = row->sizes[i], zero = row->buckets + ((u32)i & (ZEROS - 1));
        int32_t own = (int32_t)(size >> shift) - first;
        row->bucket[i] = size ? (u32)(own > 0 ? own : 0) : zero;
    }
}

/* Count the elements of buckets, which tells the ranks of each. */
INLINE void count(const Row *row) {
    u32 *counts = row->counters, rank = 0;
    FILL(counts, 0, sizeof *counts * (row->buckets + ZEROS));
    for (i64 i = 0; i < row->length; i++)
        counts[row->bucket[i]]++;
    for (u32 own = row->buckets; own < row->buckets + ZEROS; own++) {
        rank += counts[own];
        row->table[own] = (Bucket){0, 0, ~0u, 0};
    }
    for (u32 own = 0; own < row->buckets; own++) {
        /* Nobody asks for one that is empty. */
        row->table[own] = (Bucket){rank, counts[own] - 1, 0, 0};
        rank += counts[own];
    }
}

/* Return which of up to WORD numbers are not above `most` once `from` is subtracted, as bits. */
INLINE u64 within(const u32 *numbers, i64 count, u32 from, u32 most) {
    u64 found = 0;
    i64 i = 0;
    for (; i + LANES <= count; i += LANES) {
        Lanes own;
        u16 bits;
        COPY(&own, numbers + i, sizeof own);
        Bits are = __builtin_convertvector(own - from <= most, Bits);
        COPY(&bits, &are, sizeof bits);
        found |= (u64)bits << i;
    }
    for (; i < count; i++)
        found |= (u64)(numbers[i] - from <= most) << i;
    return found;
}

/* List the elements whose rank decides; return how many. */
INLINE u32 list(const Row *row) {
    u64 least = row->limits[0], span = row->limits[row->length - 1] - least;
    u32 found = 0, zeros = 0;
    for (i64 start = 0; span && start < row->length; start += WORD) {
        i64 length = row->length - start < WORD ? row->length - start : WORD;
        u64 own = within(row->draws + start, length, (u32)least, (u32)(span - 1));
        u64 zero = within(row->sizes + start, length, 0, 0);
        for (; own; own &= own - 1) {
            u64 before = zeros + __builtin_popcountll(zero & ((own & -own) - 1));
            row->open[found++] = before << 32 | (u32)(start + __builtin_ctzll(own));
        }
        zeros += __builtin_popcountll(zero);
    }
    return found;
}

/* Write what the ranks of buckets decide of the listed elements, and list the others: how many
   they are, and how many comparisons tell their ranks. */
INLINE u32 decide(const Row *row, u32 found, u64 *work) {
    u32 left = 0;
    *work = 0;
    for (u32 number = 0; number < found; number++) {
        u32 i = (u32)row->open[number], before = row->open[number] >> 32;
        Bucket own = row->table[row->bucket[i]];
        u32 rank = own.rank + (before & own.by_zeros);
        u64 draw = row->draws[i], least = row->limits[rank], most = row->limits[rank + own.more];
        u32 is_left = draw - least < most - least;
        row->kept[i] = draw < least;
        row->open[left] = i;
        left += is_left;
        *work += own.more & (0 - is_left);
    }
    return left;
}

/* Order elements by their buckets, and in each by their places; zeros overwrite each other. */
INLINE void group(const Row *row) {
    u32 *next = row->counters;
    for (u32 own = 0; own < row->buckets + ZEROS; own++)
        next[own] = row->table[own].rank;
    for (i64 i = 0; i < row->length; i++)
        row->order[next[row->bucket[i]]++] = (u64)row->sizes[i] << 32 | (u32)i;
}

/* Write which of the listed elements are kept: a rank is that of the bucket, and as many more as
   elements of the bucket are smaller, or equal and before it. */
INLINE void compare(const Row *row, u32 left) {
    for (u32 number = 0; number < left; number++) {
        u32 i = (u32)row->open[number];
        Bucket own = row->table[row->bucket[i]];
        u64 mine = (u64)row->sizes[i] << 32 | i, rank = own.rank;
        const u64 *others = row->order + own.rank;
        for (u32 other = 0; other <= own.more; other++)
            rank += others[other] < mine;
        row->kept[i] = row->draws[i] < row->limits[rank];
    }
}

/* Sort by size, stably, what lies in two places of memory; return where it lies then. */
INLINE u64 *sorted(u64 *order, u64 *spare, i64 length, u32 *counters) {
    FILL(counters, 0, sizeof *counters * DIGITS * BINS);
    for (i64 at = 0; at < length; at++)
        for (int step = 0; step < DIGITS; step++)
            counters[step * BINS + (order[at] >> (32 + step * DIGIT)) % BINS]++;
    for (int step = 0; step < DIGITS; step++) {
        int shift = 32 + step * DIGIT;
        u32 *own = counters + step * BINS, total = 0;
        if (own[(order[0] >> shift) % BINS] == length) continue; /* all have this digit */
        for (u32 bin = 0; bin < BINS; bin++) {
            u32 here = own[bin];
            own[bin] = total;
            total += here;
        }
        for (i64 at = 0; at < length; at++)
            spare[own[(order[at] >> shift) % BINS]++] = order[at];
        u64 *other = order;
        order = spare;
        spare = other;
    }
    return order;
}

/* Write which elements of a grouped row are kept, by the ranks of all. */
INLINE void rank_all(const Row *row) {
    i64 length = row->length, zeros = 0, falls = 0;
    u64 *order = row->order, *spare = row->open;
    for (i64 i = 0; i < length; i++) {
        spare[zeros] = i;
        zeros += !row->sizes[i];
    }
    COPY(order, spare, sizeof *order * zeros);
    for (i64 at = 1; at < length; at++)
        falls += order[at] < order[at - 1];
    /* Buckets of one size are in order. */
    if (falls) order = sorted(order, spare, length, row->counters);
    for (i64 rank = 0; rank < length; rank++) {
        u32 i = (u32)order[rank];
        row->kept[i] = row->draws[i] < row->limits[rank];
    }
}

/* Write which elements have a draw below the limit of their rank: uint8[rows, length].

   values: float32[rows, length], ranked by magnitude from the smallest, equal ones by index, any
   NaN last. draws: uint32[rows, length]. limits: uint64[length], by rank, none below the one
   before. bits: there are 2^bits buckets, at most BINS. Scratch: words, uint32[2, length]; pairs,
   uint64[2, length]; table, Bucket[2^bits + ZEROS]; counters, uint32[DIGITS * BINS]. */
int mstore_pass(void *returned, void *raised, i64 rows, i64 length, i64 bits, const u32 *values,
                const u32 *draws, const u64 *limits, u32 *words, u64 *pairs, Bucket *table,
                u32 *counters, u8 *kept) {
    int shift = SIZE_BITS - OCTAVE_BITS - (int)bits;
    for (i64 start = 0; start < rows * length; start += length) {
        Row row = {length, (u32)1 << bits, limits, draws + start, words, words + length,
                   pairs,  pairs + length, table,  counters,      kept + start};
        u64 work;
        keep_below(&row);
        choose(&row, measure(&row, values + start), shift);
        count(&row);
        u32 left = decide(&row, list(&row), &work);
        if (!left) continue;
        group(&row);
        if (work > FEW * (u64)length)
            rank_all(&row);
        else
            compare(&row, left);
    }
    return 0;
}
