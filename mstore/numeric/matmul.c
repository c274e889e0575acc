/* Products of matrices, in one order of sums: the same bits for any vectors and any processor.

   An element of the result adds its products in float64 by ascending inner index, to what is there.
   Factors are float32, so each product is exact in float64: a fused multiply and add, and the two
   by themselves, round to the same.  Lanes are columns.  Nothing here checks an address. */

#include <stdint.h>

#if defined(__AVX512F__)
#define LANES 8
#else
#define LANES 4
#endif
#define VECTORS 4
#define PANEL (LANES * VECTORS) /* columns whose sums are in registers */
#define TOGETHER 4              /* rows, likewise */
#define DEEP 64                 /* inner indices whose factors are widened at a time */

#define INLINE static inline __attribute__((always_inline))
#define COPY __builtin_memcpy
#define least(a, b) ((a) < (b) ? (a) : (b))

#pragma STDC FP_CONTRACT OFF

typedef int64_t i64;
typedef double D __attribute__((ext_vector_type(LANES)));

typedef struct {
    double right[DEEP][PANEL], left[TOGETHER][DEEP], sums[TOGETHER][PANEL];
} Scratch;

INLINE D add(D sum, double left, D right) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return __builtin_elementwise_fma((D)left, right, sum);
#else
    return sum + left * right;
#endif
}

/* sums += left @ right, for TOGETHER rows, PANEL columns and `deep` inner indices. */
INLINE void product(Scratch *own, i64 deep) {
    D found[TOGETHER][VECTORS];
    COPY(found, own->sums, sizeof found);
    for (i64 k = 0; k < deep; k++) {
        D right[VECTORS];
        COPY(right, own->right[k], sizeof right);
        for (int i = 0; i < TOGETHER; i++)
            for (int v = 0; v < VECTORS; v++)
                found[i][v] = add(found[i][v], own->left[i][k], right[v]);
    }
    COPY(own->sums, found, sizeof found);
}

static void panel(const float *left, i64 rows, i64 left_stride, i64 deep, i64 width, double *sums,
                  i64 sums_stride, Scratch *own) {
    for (i64 top = 0; top < rows; top += TOGETHER) {
        const i64 count = least(TOGETHER, rows - top);
        for (i64 i = 0; i < TOGETHER; i++) {
            /* Beyond the last row it stands in; nobody reads the result. */
            const float *from = left + (top + least(i, count - 1)) * left_stride;
            for (i64 k = 0; k < deep; k++)
                own->left[i][k] = from[k];
            if (i < count)
                COPY(own->sums[i], sums + (top + i) * sums_stride, width * sizeof(double));
        }
        product(own, deep);
        for (i64 i = 0; i < count; i++)
            COPY(sums + (top + i) * sums_stride, own->sums[i], width * sizeof(double));
    }
}

/* sums[rows, columns] += left[rows, inner] @ right[inner, columns], for each of `blocks`: those of
   left and of sums lie side by side in their rows, those of right one after the other.
   Strides: elements from one row to the next, of left and of sums. */
int mstore_pass(void *returned, void *raised, const float *left, i64 left_stride, const float *right,
                double *sums, i64 sums_stride, i64 rows, i64 inner, i64 columns, i64 blocks,
                Scratch *own) {
    __builtin_memset(own, 0, sizeof *own);
    for (i64 block = 0; block < blocks; block++)
        for (i64 column = 0; column < columns; column += PANEL)
            for (i64 k = 0; k < inner; k += DEEP) {
                const i64 deep = least(DEEP, inner - k), width = least(PANEL, columns - column);
                for (i64 j = 0; j < deep; j++) {
                    const float *from = right + (block * inner + k + j) * columns + column;
                    for (i64 l = 0; l < width; l++)
                        own->right[j][l] = from[l];
                }
                panel(left + block * inner + k, rows, left_stride, deep, width,
                      sums + block * columns + column, sums_stride, own);
            }
    return 0;
}
