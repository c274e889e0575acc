/* The importance of elements: how far the softmax of an expert's row is from that of the base's
   row, times how far the element moved.

   exp and log are written out, in float64 steps that IEEE 754 defines: those of a C library differ
   from machine to machine.  exp is within 2^-48 of it, log within 2 units in the last place.  Which
   steps a row takes follows from its elements alone.  Sums are of LANES lanes by index, and those
   are added by halving, so vectors of any length give the same bits.

   Nothing here checks an address. */

#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))
#define COPY __builtin_memcpy
#define FILL __builtin_memset
#define PASS int mstore_pass(void *returned, void *raised,

#pragma STDC FP_CONTRACT OFF

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int64_t i64;

/* Codes of element types, as in numeric/codes.py. */
enum { BF16, F16, F32 };
enum {
    LANES = 16,
    WIDE = LANES / 2, /* numbers of float64 that steps work on together */
    HALF = 16,
    LOW = 0xffff,
    BINS = 1 << HALF,
    ZEROS = 8,
    WORD = 64,
    WANTED = 3, /* upper halves that are looked for: those of quartiles */
    MAGNITUDE = 0x7fffffff,
    SMALL = 0x42800000, /* the bits of 64: exp of that, and of its negative, is far from the ends */
    STEP = 0x3c800000   /* the bits of 1/64 */
};

typedef double D __attribute__((ext_vector_type(WIDE)));
typedef i64 Is __attribute__((ext_vector_type(WIDE)));
typedef u64 U __attribute__((ext_vector_type(WIDE)));
typedef u32 Lanes __attribute__((ext_vector_type(LANES)));
typedef int32_t LaneIs __attribute__((ext_vector_type(LANES)));
typedef _Bool Bits __attribute__((ext_vector_type(LANES)));
typedef float F __attribute__((ext_vector_type(WIDE)));

/* Stored elements of both sides, in rows of one length. */
typedef struct {
    i64 base_code;
    const u8 *base;
    i64 expert_code;
    const u8 *expert;
    i64 length;
    float *ours, *theirs, *moved; /* a row of each, and the differences, up to whole LANES */
} Rows;

/* -- elements ---------------------------------------------------------------------------------- */

INLINE u32 of_half(u16 stored) {
    u32 sign = (u32)(stored & 0x8000) << 16, magnitude = stored & 0x7fff, bits = magnitude << 13;
    float small = (float)(int32_t)magnitude * 0x1p-24f;
    u32 normal = bits + (112 << 23), own;
    COPY(&own, &small, sizeof own);
    bits = magnitude >= 0x7c00 ? bits | 0x7f800000 : magnitude < 0x0400 ? own : normal;
    return bits | sign;
}

/* Widen a row, and fill it up with zeros. */
INLINE void widen(i64 code, const u8 *stored, i64 row, i64 length, float *found) {
    const u16 *halves = (const u16 *)stored + row * length;
    u32 *bits = (u32 *)found;
    if (code == BF16)
        for (i64 i = 0; i < length; i++)
            bits[i] = (u32)halves[i] << 16;
    else if (code == F16)
        for (i64 i = 0; i < length; i++)
            bits[i] = of_half(halves[i]);
    else
        COPY(bits, (const u32 *)stored + row * length, sizeof *bits * length);
    FILL(bits + length, 0, sizeof *bits * (-length & (LANES - 1)));
}

/* Return the bits of the largest magnitude, above infinity if there is a NaN. */
INLINE u32 largest(const float *values, i64 length) {
    const u32 *bits = (const u32 *)values;
    u32 found = 0;
    for (i64 i = 0; i < length; i++) {
        u32 size = bits[i] & MAGNITUDE;
        found = size > found ? size : found;
    }
    return found;
}

/* Load a row of both sides, and subtract. */
INLINE void load(const Rows *rows, i64 row) {
    widen(rows->base_code, rows->base, row, rows->length, rows->ours);
    widen(rows->expert_code, rows->expert, row, rows->length, rows->theirs);
    for (i64 i = 0; i < rows->length; i++)
        rows->moved[i] = rows->theirs[i] - rows->ours[i];
}

/* -- exp, log and sums ------------------------------------------------------------------------- */

#define POLYNOMIAL(y, x, ...)                                                                      \
    do {                                                                                           \
        static const double terms[] = {__VA_ARGS__};                                               \
        y = terms[0];                                                                              \
        for (u64 at = 1; at < sizeof terms / sizeof *terms; at++)                                  \
            y = y * x + terms[at];                                                                 \
    } while (0)

INLINE D chosen(Is when, D one, D other) { return (D)(((U)one & (U)when) | ((U)other & ~(U)when)); }

INLINE D wide(const float *place) {
    F found;
    COPY(&found, place, sizeof found);
    return __builtin_convertvector(found, D);
}

/* Return exp of numbers up to 64, a NaN for a NaN. */
INLINE D exp_of(D x) {
    /* Added to a small number, it leaves the nearest whole one in the low bits. */
    const double rounder = 0x1.8p52;
    /* ln 2 in two parts; the product of the first with an exponent is exact. */
    const double high = 0x1.62e42fee00000p-1, low = 0x1.a39ef35793c76p-33;
    const D rounded = x * 1.4426950408889634 + rounder, whole = rounded - rounder;
    const U power = ((U)rounded - 0x4338000000000000 + 1023) << 52;
    /* A quarter of what is left needs five terms less than all of it, and two squares. */
    const D r = ((x - whole * high) - whole * low) * 0.25;
    D y;
    POLYNOMIAL(y, r, 1.0 / 40320.0, 1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0,
               0.5, 1.0, 1.0);
    y = y * y;
    y = y * y;
    /* Of less than -708 it is no normal number, and counts as 0. */
    return chosen(x < -708.0, (D)0.0, y * (D)power);
}

/* Return exp of differences up to 1/64, by a power series. */
INLINE D exp_of_step(D d) {
    D y;
    POLYNOMIAL(y, d, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0);
    return y;
}

/* Return log of normal numbers above 0; not of infinity or a NaN. */
INLINE D log_of(D x) {
    const double rounder = 0x1.8p52;
    /* From the bits of the root of 1/2 on.  The bias makes it positive. */
    const U biased = ((U)x - 0x3fe6a09e667f3bcd + ((u64)1023 << 52)) >> 52;
    const D exponent = (D)(biased + 0x4338000000000000) - (rounder + 1023.0);
    const D m = (D)((U)x - ((biased - 1023) << 52)), s = (m - 1.0) / (m + 1.0), z = s * s;
    D y;
    POLYNOMIAL(y, z, 1.0 / 21.0, 1.0 / 19.0, 1.0 / 17.0, 1.0 / 15.0, 1.0 / 13.0, 1.0 / 11.0,
               1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0, 1.0);
    return exponent * 0.6931471805599453 + 2.0 * s * y;
}

/* Add numbers of a row from element i on; those behind its end count nothing. */
INLINE D plus(D sum, D own, i64 i, i64 length) {
    if (i + WIDE > length)
        for (int lane = 0; lane < WIDE; lane++)
            if (i + lane >= length) own[lane] = 0.0;
    return sum + own;
}

INLINE double total(const D sums[2]) {
    D own = sums[0] + sums[1];
    for (int half = WIDE / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++)
            own[lane] += own[half + lane];
    return own[0];
}

/* -- divergence -------------------------------------------------------------------------------- */

/* Return what is subtracted before exp: 0, or the largest value where exp might overflow. */
INLINE double top(const float *values, i64 length) {
    if (largest(values, length) <= SMALL) return 0.0;
    float found = values[0];
    for (i64 i = 1; i < length; i++)
        found = values[i] > found ? values[i] : found;
    return found;
}

/* Write exp of a row, times the same number for all, and return the sum. */
INLINE double exponentials(const float *values, i64 length, double *found) {
    const double most = top(values, length);
    D sums[2] = {0.0, 0.0};
    for (i64 i = 0; i < length; i += LANES)
        for (int part = 0; part < 2; part++) {
            const i64 at = i + part * WIDE;
            const D own = exp_of(wide(values + at) - most);
            COPY(found + at, &own, sizeof own);
            sums[part] = plus(sums[part], own, at, length);
        }
    return total(sums);
}

/* Write exp of the expert's row, as that of the base's times exp of the differences; return the
   sum. */
INLINE double grown(const Rows *rows, const double *base, double *found) {
    D sums[2] = {0.0, 0.0};
    for (i64 i = 0; i < rows->length; i += LANES)
        for (int part = 0; part < 2; part++) {
            const i64 at = i + part * WIDE;
            D own;
            COPY(&own, base + at, sizeof own);
            own = own * exp_of_step(wide(rows->theirs + at) - wide(rows->ours + at));
            COPY(found + at, &own, sizeof own);
            sums[part] = plus(sums[part], own, at, rows->length);
        }
    return total(sums);
}

/* Return p log(p / q) - p + q of shares that follow from differences up to 1/64.

   With s = (p - q) / (p + q), log(p / q) is 2 (s + s^3 / 3 + s^5 / 5 + ...): one division, and
   nothing is lost where p and q are nearly equal. */
INLINE D near(D p, D q) {
    const D gap = p - q, s = gap / (p + q), z = s * s;
    D y;
    POLYNOMIAL(y, z, 1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0);
    return gap * s + (p + p) * s * z * y;
}

/* Return p log(p / q) - p + q of any shares. */
INLINE D far(D p, D q) {
    const D ratio = p / q;
    /* The last difference is a NaN where the logarithm would be one, and else 0. */
    return p * log_of(ratio) - (p - q) + (ratio - ratio);
}

/* Return sum p log(p / q) of a row, p and q the softmax of expert and base, each plus 1e-8.

   Both add up to the same, so sum p log(p / q) - p + q is that, too; it does not lose the small
   divergence of similar rows to the rounding of the totals. mine, base: memory for a row. */
INLINE float diverge(const Rows *rows, double *mine, double *base) {
    const i64 length = rows->length;
    const int is_near = largest(rows->moved, length) <= STEP;
    const double theirs = exponentials(rows->ours, length, base);
    const double ours =
        is_near ? grown(rows, base, mine) : exponentials(rows->theirs, length, mine);
    const double part = 1.0 / ours, own_part = 1.0 / theirs;
    D sums[2] = {0.0, 0.0};
    for (i64 i = 0; i < length; i += LANES)
        for (int half = 0; half < 2; half++) {
            const i64 at = i + half * WIDE;
            D p, q;
            COPY(&p, mine + at, sizeof p);
            COPY(&q, base + at, sizeof q);
            p = p * part + 1e-8;
            q = q * own_part + 1e-8;
            sums[half] = plus(sums[half], is_near ? near(p, q) : far(p, q), at, length);
        }
    const double found = total(sums);
    /* Rounding may leave less than nothing. */
    return found < 0.0 ? 0.0f : (float)found;
}

/* -- importances ------------------------------------------------------------------------------- */

/* Write the importances of a row's elements. */
INLINE void weigh(const Rows *rows, float divergence, float *found) {
    for (i64 i = 0; i < rows->length; i++)
        found[i] = __builtin_fabsf(rows->moved[i]) * divergence;
}

INLINE u16 bits_of(LaneIs is) {
    u16 found;
    Bits own = __builtin_convertvector(is, Bits);
    COPY(&found, &own, sizeof found);
    return found;
}

/* -- passes ------------------------------------------------------------------------------------ */

/* base, expert: stored bytes of whole rows. singles: float32[3, room], room as long as a row, up to
   whole LANES. */
#define SIDES                                                                                      \
    i64 base_code, const u8 *base, i64 expert_code, const u8 *expert, i64 count, i64 length,       \
        float *singles
#define ROWS                                                                                       \
    const i64 room = (length + LANES - 1) / LANES * LANES;                                         \
    const Rows rows = {base_code,     base,                                                        \
                       expert_code,   expert,                                                      \
                       length,        singles,                                                     \
                       singles + room, singles + 2 * room}

#if defined(DIVERGENCES)
/* Write the divergence of each row.  doubles: float64[2, room]. */
PASS SIDES, double *doubles, float *found) {
    ROWS;
    for (i64 row = 0; row < count; row++) {
        load(&rows, row);
        found[row] = diverge(&rows, doubles, doubles + room);
    }
    return 0;
}
#endif

#if defined(UPPER)
/* Write divergences and importances, float32[count, length], count the upper halves of these, and
   add up the squares of differences by them.

   doubles: as above. counts: int64[BINS + ZEROS]. squares: float64[BINS + ZEROS]. */
PASS SIDES, double *doubles, float *divergences, float *importances, i64 *counts,
    double *squares) {
    ROWS;
    u32 *places = (u32 *)rows.theirs;
    for (i64 row = 0; row < count; row++) {
        const u32 *bits = (const u32 *)importances + row * length;
        load(&rows, row);
        divergences[row] = diverge(&rows, doubles, doubles + room);
        weigh(&rows, divergences[row], importances + row * length);
        /* What did not move, which may be most, is counted at places in turn: no addition waits for
           the one before it. */
        for (i64 i = 0; i < length; i++) {
            const u32 zero = BINS + ((u32)i & (ZEROS - 1));
            places[i] = rows.moved[i] == 0.0f && !bits[i] ? zero : bits[i] >> HALF;
        }
        for (i64 i = 0; i < length; i++) {
            const double own = rows.moved[i];
            counts[places[i]]++;
            squares[places[i]] += own * own;
        }
    }
    for (int place = 0; place < ZEROS; place++) {
        counts[0] += counts[BINS + place];
        counts[BINS + place] = 0;
    }
    return 0;
}
#endif

#if defined(WEIGH)
/* Write importances: float32[count, length]. */
PASS SIDES, const float *divergences, float *importances) {
    ROWS;
    for (i64 row = 0; row < count; row++) {
        load(&rows, row);
        weigh(&rows, divergences[row], importances + row * length);
    }
    return 0;
}
#endif

#if defined(TAKE)
/* Write which elements are of this importance, or more; a NaN is not. */
PASS SIDES, const float *divergences, const float *least, u8 *kept) {
    ROWS;
    for (i64 row = 0; row < count; row++) {
        load(&rows, row);
        weigh(&rows, divergences[row], rows.ours);
        for (i64 i = 0; i < length; i++)
            kept[row * length + i] = rows.ours[i] >= *least;
    }
    return 0;
}
#endif

#if defined(LOWER)
/* Count the lower halves of those importances that have one of these upper halves: uint32[WANTED],
   which ascend.  counts: int64[WANTED, BINS]. */
PASS const u32 *bits, i64 n, const u32 *halves, i64 *counts) {
    i64 zeros = 0;
    u32 last[WORD] = {0};
    for (i64 start = 0; start < n; start += WORD) {
        const u32 *own = bits + start;
        u64 found = 0;
        if (n - start < WORD) {
            COPY(last, own, sizeof *own * (n - start));
            zeros -= WORD - (n - start);
            own = last;
        }
        for (int i = 0; i < WORD; i += LANES) {
            Lanes some;
            u32 is = 0;
            COPY(&some, own + i, sizeof some);
            for (int number = 0; number < WANTED; number++)
                is |= bits_of(some >> HALF == halves[number]);
            /* Zeros, which may be most, are only counted. */
            const u32 none = bits_of(some == 0);
            zeros += __builtin_popcount(none);
            found |= (u64)(is & ~none) << i;
        }
        for (; found; found &= found - 1) {
            const u32 one = own[__builtin_ctzll(found)], half = one >> HALF;
            i64 number = 0;
            for (int before = 0; before < WANTED - 1; before++)
                number += half > halves[before];
            counts[number * BINS + (one & LOW)]++;
        }
    }
    if (!halves[0]) counts[0] += zeros;
    return 0;
}
#endif
