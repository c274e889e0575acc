/* Low-rank products: base + scale * (left @ right) for a run of elements, alone (`apply`) or
   weighted and added up (`sum`); and what the norms of a product follow from (`squares`).

   Owns the order of the arithmetic: the sum of an element adds its products in float32, one after
   the other by rank, and no product is contracted into a sum.  A sum of experts adds their weighted
   deltas in order, as `merge.arithmetic.passes` does for experts that were read; the bits are the
   same.  Lanes are elements, so vectors of any length give the same bits.

   A block of ROWS rows and PANEL columns passes through all products while it is in the first-level
   cache.  Nothing here checks an address. */

#include <stdint.h>

#if defined(__AVX512F__)
#define LANES 16
#define TOGETHER 4 /* rows whose sums are in registers */
#define PANEL 64
#else
#define LANES 8
#define TOGETHER 2
#define PANEL 32
#endif
#define ROWS 32
#define VECTORS (PANEL / LANES)

/* Codes of element types, as in numeric/codes.py. */
enum { BF16, F16, F32 };

#define INLINE static inline __attribute__((always_inline))
#define COPY __builtin_memcpy
#define least(a, b) ((a) < (b) ? (a) : (b))

#pragma STDC FP_CONTRACT OFF

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef int64_t i64;
typedef float F __attribute__((ext_vector_type(LANES)));
typedef u32 U __attribute__((ext_vector_type(LANES)));
typedef u16 H __attribute__((ext_vector_type(LANES)));
typedef int32_t Is __attribute__((ext_vector_type(LANES)));

#if !defined(SQUARES)

/* One expert: float32[rows, rank] from the first row of the run on, float32[rank, columns]. */
typedef struct {
    const float *left, *right;
    i64 rank;
    float scale, weight;
} Product;

/* What is added up: experts in order; the sum is divided, then multiplied. */
typedef struct {
    i64 experts;
    const Product *products;
    float divisor, factor;
} Sum;

/* A run of n elements of a matrix, of `rows` of its rows: how base and result lie at rest.
   skipped: elements of the first row before the run. */
typedef struct {
    i64 skipped, n, rows, columns;
    const u8 *base;
    i64 base_code;
    u8 *out;
    i64 out_code;
} Run;

/* A block of the run.  Elements that are not in the run are anything. */
typedef struct {
    float base[ROWS][PANEL], mixed[ROWS][PANEL], panel[];
} Block;

/* -- elements ---------------------------------------------------------------------------------- */

INLINE F at(const float *place) {
    F found;
    COPY(&found, place, sizeof found);
    return found;
}

INLINE U chosen(Is when, U one, U other) { return (one & (U)when) | (other & ~(U)when); }

INLINE U quiet(F x) { return chosen(x != x, (U)0x7fc00000, (U)x); }

INLINE U of_half(U stored) {
    const U sign = (stored & 0x8000) << 16, magnitude = stored & 0x7fff, shifted = magnitude << 13;
    const F small = __builtin_convertvector((Is)magnitude, F) * 0x1p-24f;
    U bits = chosen(magnitude < 0x0400, (U)small, shifted + (112 << 23));
    return chosen(magnitude >= 0x7c00, shifted | 0x7f800000, bits) | sign;
}

/* To the nearest, ties to even; a NaN is exact. */
INLINE U to_half(U bits) {
    const U sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
    const U rounded = (magnitude - (112 << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    const U small = (U)((F)magnitude + 0.5f) - 0x3f000000;
    const U nan = chosen(magnitude > 0x7f800000, (magnitude >> 13) & 0x3ff, (U)0);
    U half = chosen(magnitude < 0x38800000, small, rounded);
    return chosen(magnitude >= 0x47800000, nan | 0x7c00, half) | sign;
}

INLINE U to_bfloat(U bits) { return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16; }

/* Widen LANES elements. */
INLINE void widen(i64 code, const u8 *stored, float *to) {
    U bits;
    if (code == BF16 || code == F16) {
        H halves;
        COPY(&halves, stored, sizeof halves);
        bits = __builtin_convertvector(halves, U);
        bits = code == BF16 ? bits << 16 : of_half(bits);
    } else {
        COPY(&bits, stored, sizeof bits);
    }
    COPY(to, &bits, sizeof bits);
}

/* Narrow LANES elements to the nearest. */
INLINE void narrow(i64 code, U bits, u8 *to) {
    if (code == BF16 || code == F16) {
        H halves = __builtin_convertvector(code == BF16 ? to_bfloat(bits) : to_half(bits), H);
        COPY(to, &halves, sizeof halves);
    } else {
        COPY(to, &bits, sizeof bits);
    }
}

/* -- blocks ------------------------------------------------------------------------------------ */

/* Where a row of a block lies in the run: `count` elements, from column `skipped` of the block. */
typedef struct {
    i64 at, skipped, count;
} Part;

INLINE Part part_of(const Run *run, i64 row, i64 column) {
    const i64 begin = row * run->columns + column - run->skipped;
    const i64 start = begin < 0 ? 0 : begin;
    const i64 end = least(begin + least(PANEL, run->columns - column), run->n);
    return (Part){start, start - begin, end > start ? end - start : 0};
}

INLINE i64 size_of(i64 code) { return code == BF16 || code == F16 ? 2 : 4; }

INLINE void load(const Run *run, i64 row, i64 column, float *to) {
    const Part part = part_of(run, row, column);
    const i64 size = size_of(run->base_code);
    const u8 *stored = run->base + size * part.at;
    /* The next block's: rows are far apart, so the processor does not foresee it. */
    for (i64 line = 0; line < size * PANEL; line += 64)
        __builtin_prefetch(stored + size * PANEL + line);
    u8 whole[4 * PANEL];
    if (part.count < PANEL) {
        __builtin_memset(whole, 0, sizeof whole);
        COPY(whole + size * part.skipped, stored, size * part.count);
        stored = whole;
    }
    for (int v = 0; v < VECTORS; v++)
        widen(run->base_code, stored + size * LANES * v, to + LANES * v);
}

INLINE void store(const Run *run, i64 row, i64 column, const U *bits) {
    const Part part = part_of(run, row, column);
    const i64 size = size_of(run->out_code);
    u8 *stored = run->out + size * part.at, whole[4 * PANEL];
    u8 *to = part.count < PANEL ? whole : stored;
    for (int v = 0; v < VECTORS; v++)
        narrow(run->out_code, bits[v], to + size * LANES * v);
    if (part.count < PANEL) COPY(stored, whole + size * part.skipped, size * part.count);
}

/* Lay the columns of a panel side by side. */
INLINE void gather(const Product *own, i64 columns, i64 column, float *panel) {
    const i64 width = least(PANEL, columns - column);
    const float *right = own->right + column;
    if (width < PANEL) {
        __builtin_memset(panel, 0, own->rank * PANEL * sizeof *panel);
        for (i64 r = 0; r < own->rank; r++)
            COPY(panel + r * PANEL, right + r * columns, width * sizeof *panel);
        return;
    }
    for (i64 r = 0; r < own->rank; r++)
        for (int v = 0; v < VECTORS; v++) {
            const F part = at(right + r * columns + LANES * v);
            COPY(panel + r * PANEL + LANES * v, &part, sizeof part);
        }
}

/* The sums of a product for rows [top + i, top + i + TOGETHER) of the run and the panel's columns. */
INLINE void sums_of(const Product *own, const Run *run, i64 top, const float *panel,
                    F (*sums)[VECTORS]) {
    const float *left[TOGETHER];
    /* Beyond the last row it stands in; nobody reads the result. */
    for (int i = 0; i < TOGETHER; i++)
        left[i] = own->left + least(top + i, run->rows - 1) * own->rank;
    F found[TOGETHER][VECTORS];
    for (int i = 0; i < TOGETHER; i++)
        for (int v = 0; v < VECTORS; v++)
            found[i][v] = 0;
    for (i64 r = 0; r < own->rank; r++, panel += PANEL) {
        F right[VECTORS];
        COPY(right, panel, sizeof right);
        for (int i = 0; i < TOGETHER; i++)
            for (int v = 0; v < VECTORS; v++) {
                const F product = left[i][r] * right[v];
                found[i][v] = found[i][v] + product;
            }
    }
    COPY(sums, found, sizeof found);
}

/* A vector of the expert: base + scale * sum. */
INLINE F applied(const Product *own, F base, F sum) {
    const F moved = own->scale * sum;
    return base + moved;
}

#if defined(APPLY)

#define GIVEN Product

static void block_of(const Run *run, i64 top, i64 column, const Product *own, Block *block) {
    const i64 rows = least(ROWS, run->rows - top);
    gather(own, run->columns, column, block->panel);
    for (i64 i = 0; i < rows; i += TOGETHER) {
        F sums[TOGETHER][VECTORS];
        sums_of(own, run, top + i, block->panel, sums);
        for (i64 j = 0; j < least(TOGETHER, rows - i); j++) {
            U bits[VECTORS];
            load(run, top + i + j, column, block->base[i + j]);
            for (int v = 0; v < VECTORS; v++)
                bits[v] = quiet(applied(own, at(block->base[i + j] + LANES * v), sums[j][v]));
            store(run, top + i + j, column, bits);
        }
    }
}

#else

#define GIVEN Sum

static void block_of(const Run *run, i64 top, i64 column, const Sum *sum, Block *block) {
    const i64 rows = least(ROWS, run->rows - top);
    for (i64 i = 0; i < rows; i++)
        load(run, top + i, column, block->base[i]);
    __builtin_memset(block->mixed, 0, sizeof block->mixed);
    for (i64 k = 0; k < sum->experts; k++) {
        const Product *own = sum->products + k;
        gather(own, run->columns, column, block->panel);
        for (i64 i = 0; i < rows; i += TOGETHER) {
            F sums[TOGETHER][VECTORS];
            sums_of(own, run, top + i, block->panel, sums);
            for (int j = 0; j < TOGETHER; j++)
                for (int v = 0; v < VECTORS; v++) {
                    const F base = at(block->base[i + j] + LANES * v);
                    float *mixed = block->mixed[i + j] + LANES * v;
                    const F expert = applied(own, base, sums[j][v]);
                    const F delta = own->weight * (expert - base);
                    /* Equal infinities are no delta.  A NaN makes a NaN, which the base's NaN is,
                       too; zeros of either sign add nothing, as weights are finite. */
                    const U total = chosen(expert != base, (U)(at(mixed) + delta), (U)at(mixed));
                    COPY(mixed, &total, sizeof total);
                }
        }
    }
    for (i64 i = 0; i < rows; i++) {
        U bits[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            const F base = at(block->base[i] + LANES * v);
            F mixed = at(block->mixed[i] + LANES * v);
            if (sum->divisor != 1) mixed = mixed / sum->divisor;
            if (sum->factor != 1) mixed = mixed * sum->factor;
            /* A mix of zero gives the base's own bits; of all NaNs only the quiet one has it. */
            bits[v] = chosen(mixed == 0, (U)base, quiet(base + mixed));
        }
        store(run, top + i, column, bits);
    }
}

#endif

static void each_block(const Run *run, const GIVEN *given, Block *block) {
    for (i64 top = 0; top < run->rows; top += ROWS)
        for (i64 column = 0; column < run->columns; column += PANEL)
            block_of(run, top, column, given, block);
}

/* A pass has the signature that numba's compiled functions have; the first two stay. */
#if defined(APPLY)

int mstore_pass(void *returned, void *raised, i64 code, const u8 *base, i64 skipped, i64 n,
                i64 rows, i64 columns, const Product *product, Block *block, u8 *out) {
    each_block(&(Run){skipped, n, rows, columns, base, code, out, F32}, product, block);
    return 0;
}

#else

int mstore_pass(void *returned, void *raised, i64 code, const u8 *base, i64 skipped, i64 n,
                i64 rows, i64 columns, i64 experts, const Product *products, const float *factors,
                Block *block, i64 out_code, u8 *out) {
    const Sum sum = {experts, products, factors[0], factors[1]};
    each_block(&(Run){skipped, n, rows, columns, base, code, out, out_code}, &sum, block);
    return 0;
}

#endif

#else

/* -- norms ------------------------------------------------------------------------------------- */

#define WIDE 8      /* lanes of float64: partial sums, which are added in one order */
#define COLUMNS 128 /* at a time */

typedef double D __attribute__((ext_vector_type(WIDE)));
typedef float S __attribute__((ext_vector_type(WIDE)));

INLINE D wide(const double *place) {
    D found;
    COPY(&found, place, sizeof found);
    return found;
}

INLINE double total(D x) {
    return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}

/* Widen `count` numbers that are `stride` apart into `room` places; the others are zero. */
INLINE void widened(const float *from, i64 stride, i64 count, i64 room, double *to) {
    for (i64 j = 0; j < room; j++)
        to[j] = j < count ? from[j * stride] : 0;
}

/* gram = right @ right^T, below the diagonal and on it.  Returns the largest sum of the squares of
   a column. */
static double gram_of(const float *right, i64 rank, i64 columns, double *block, double *gram) {
    D largest = 0;
    __builtin_memset(gram, 0, rank * rank * sizeof *gram);
    for (i64 column = 0; column < columns; column += COLUMNS) {
        D squares[COLUMNS / WIDE];
        __builtin_memset(squares, 0, sizeof squares);
        for (i64 r = 0; r < rank; r++) {
            const i64 count = least(COLUMNS, columns - column);
            double *own = block + r * COLUMNS;
            widened(right + r * columns + column, 1, count, COLUMNS, own);
            for (int j = 0; j < COLUMNS / WIDE; j++)
                squares[j] += wide(own + WIDE * j) * wide(own + WIDE * j);
            for (i64 q = 0; q <= r; q++) {
                D sum = 0;
                for (i64 j = 0; j < COLUMNS; j += WIDE)
                    sum += wide(own + j) * wide(block + q * COLUMNS + j);
                gram[r * rank + q] += total(sum);
            }
        }
        for (int j = 0; j < COLUMNS / WIDE; j++)
            largest = largest < squares[j] ? squares[j] : largest;
    }
    double found = 0;
    for (int j = 0; j < WIDE; j++)
        found = found < largest[j] ? largest[j] : found;
    return found;
}

/* What chunks of the product have. */
typedef struct {
    double product, left, longest;
} Chunk;

/* The sums of squares of WIDE rows of the product and of the left factor: l (R R^T) l^T, l l^T. */
INLINE void rows_of(const double *left, i64 rank, const double *gram, double *product,
                    double *alone) {
    D products = 0, own = 0;
    for (i64 r = 0; r < rank; r++) {
        const D mine = wide(left + WIDE * r);
        D others = 0;
        for (i64 q = 0; q < r; q++)
            others += gram[r * rank + q] * wide(left + WIDE * q);
        products += mine * (2 * others + gram[r * rank + r] * mine);
        own += mine * mine;
    }
    COPY(product, &products, sizeof products);
    COPY(alone, &own, sizeof own);
}

/* scratch: float64[rank * rank + COLUMNS * rank + 2 * (rows + WIDE)]. out: the largest sum of the
   squares of a column of `right`, that of all of it, and a Chunk for each `chunk` of n elements,
   with the rows that it has a part of: their sums of squares, those of `left`, the largest one. */
int mstore_pass(void *returned, void *raised, const float *left, i64 rows, const float *right,
                i64 rank, i64 columns, i64 n, i64 chunk, double *scratch, double *out) {
    double *gram = scratch, *block = gram + rank * rank;
    double *products = block + COLUMNS * rank, *alone = products + rows + WIDE;
    out[0] = gram_of(right, rank, columns, block, gram);
    out[1] = 0;
    for (i64 r = 0; r < rank; r++)
        out[1] += gram[r * rank + r];
    for (i64 i = 0; i < rows; i += WIDE) {
        for (i64 r = 0; r < rank; r++)
            widened(left + i * rank + r, rank, rows - i, WIDE, block + WIDE * r);
        rows_of(block, rank, gram, products + i, alone + i);
    }
    Chunk *found = (Chunk *)(out + 2);
    for (i64 first = 0; first < n; first += chunk, found++) {
        const i64 end = (least(first + chunk, n) - 1) / columns + 1;
        *found = (Chunk){0, 0, 0};
        for (i64 i = first / columns; i < end; i++) {
            found->product += products[i];
            found->left += alone[i];
            found->longest = found->longest < alone[i] ? alone[i] : found->longest;
        }
    }
    return 0;
}

#endif
