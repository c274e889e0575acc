/* What each expert's differences are multiplied by, of the Gram matrices of all: M_k = G_k S^-1, S
   the sum of the G_k, block by block on the diagonal.

   Owns the order of the arithmetic: float64, no product contracted into a sum, lanes are columns;
   so vectors of any length give the same bits.  Nothing here checks an address. */

#include <stdint.h>

#define COPY __builtin_memcpy

#pragma STDC FP_CONTRACT OFF

typedef uint8_t u8;
typedef int8_t i8;
typedef int64_t i64;

#define SMALLEST 1e-9 /* a pivot of a matrix with ones on its diagonal */

/* Below: of one block, `width` inputs.  roots, ours: of all inputs of it, of one expert. */

/* G_k of a block over the roots of S's diagonal, on both sides, to `to`.
   packed: float32[width], the root of each input's mean square; then the correlations of inputs
   below the diagonal, row by row, 127 for 1.  shrink: what those are multiplied by. */
static void unpacked(const u8 *packed, i64 width, double weight, double shrink, double alone,
                     const double *roots, double *ours, double *to) {
    const i8 *own = (const i8 *)(packed + 4 * width);
    for (i64 i = 0; i < width; i++) {
        float root;
        COPY(&root, packed + 4 * i, sizeof root);
        ours[i] = roots[i] > 0 ? root / roots[i] : 0;
    }
    for (i64 i = 0; i < width; i++) {
        const double left = weight * ours[i];
        for (i64 j = 0; j < i; j++, own++)
            to[i * width + j] = to[j * width + i] = left * ours[j] * (shrink * (*own / 127.0));
        /* No expert has seen this input: it is averaged. */
        to[i * width + i] = roots[i] > 0 ? left * ours[i] : alone;
    }
}

/* matrix becomes its inverse; it is symmetric, with ones on its diagonal.  Returns whether it was
   not positive definite. */
static int inverted(double *matrix, i64 width) {
    for (i64 p = 0; p < width; p++) {
        double *own = matrix + p * width;
        const double pivot = own[p];
        if (!(pivot > SMALLEST)) return 1;
        own[p] = 1;
        for (i64 j = 0; j < width; j++)
            own[j] /= pivot;
        for (i64 i = 0; i < width; i++) {
            double *other = matrix + i * width;
            const double factor = other[p];
            if (i == p || factor == 0) continue;
            other[p] = 0;
            for (i64 j = 0; j < width; j++)
                other[j] -= factor * own[j];
        }
    }
    return 0;
}

#define TOGETHER 4 /* rows for which the right factor is read once */
#define least(a, b) ((a) < (b) ? (a) : (b))

/* rows = left @ right, for up to TOGETHER rows of left: float64[TOGETHER, width] of rows. */
static void multiplied(const double *left, i64 count, const double *right, i64 width,
                       double *rows) {
    const double *own[TOGETHER];
    double *a = rows, *b = a + width, *c = b + width, *d = c + width;
    /* Beyond the last row it stands in; nobody reads the result. */
    for (i64 i = 0; i < TOGETHER; i++)
        own[i] = left + least(i, count - 1) * width;
    __builtin_memset(rows, 0, TOGETHER * width * sizeof *rows);
    for (i64 l = 0; l < width; l++, right += width) {
        const double e = own[0][l], f = own[1][l], g = own[2][l], h = own[3][l];
        for (i64 j = 0; j < width; j++) {
            const double one = right[j];
            a[j] += e * one;
            b[j] += f * one;
            c[j] += g * one;
            d[j] += h * one;
        }
    }
}

/* The square of the Frobenius norm of (M^T M)^2, whose eighth root is not less than the largest
   singular value of M, and at most the eighth root of `width` times that. */
static double eighth_power(const float *matrix, i64 width, double *gram, double *rows) {
    __builtin_memset(gram, 0, width * width * sizeof *gram);
    for (i64 i = 0; i < width; i += TOGETHER) {
        const i64 count = least(TOGETHER, width - i);
        for (i64 l = 0; l < width; l++)
            for (i64 r = i; r < i + count; r++) {
                const double factor = matrix[l * width + r];
                for (i64 j = 0; j < width; j++)
                    gram[r * width + j] += factor * matrix[l * width + j];
            }
    }
    double found = 0;
    for (i64 i = 0; i < width; i += TOGETHER) {
        const i64 count = least(TOGETHER, width - i);
        multiplied(gram + i * width, count, gram, width, rows);
        for (i64 j = 0; j < count * width; j++)
            found += rows[j] * rows[j];
    }
    return found;
}

/* packed: of each expert, `blocks` as above, 4 width + width (width - 1) / 2 bytes each.  weights:
   float64[experts], and the sum of them all; then shrink.  scratch: float64[(2 width + 6) width].
   out: float32[experts, blocks, width, width].  norms: of each expert, the largest of its
   blocks' `eighth_power`, or null.  state: the number of a block of S that is
   not positive definite, or -1. */
int mstore_pass(void *returned, void *raised, const u8 *const *packed, i64 experts, i64 blocks,
                i64 width, const double *weights, double *scratch, float *out, double *norms,
                i64 *state) {
    const double total = weights[experts], shrink = weights[experts + 1];
    const i64 size = 4 * width + width * (width - 1) / 2, square = width * width;
    double *sum = scratch, *own = sum + square, *roots = own + square;
    double *ours = roots + width, *rows = ours + width;
    *state = -1;
    for (i64 k = 0; norms && k < experts; k++)
        norms[k] = 0;
    for (i64 block = 0; block < blocks; block++) {
        for (i64 i = 0; i < width; i++) {
            double found = 0;
            for (i64 k = 0; k < experts; k++) {
                float root;
                COPY(&root, packed[k] + block * size + 4 * i, sizeof root);
                found += weights[k] * ((double)root * root);
            }
            roots[i] = __builtin_elementwise_sqrt(found);
        }
        __builtin_memset(sum, 0, square * sizeof *sum);
        for (i64 k = 0; k < experts; k++) {
            unpacked(packed[k] + block * size, width, weights[k], shrink, weights[k] / total, roots,
                     ours, own);
            for (i64 i = 0; i < square; i++)
                sum[i] += own[i];
        }
        for (i64 i = 0; i < width; i++)
            sum[i * width + i] = 1;
        if (inverted(sum, width)) {
            *state = block;
            return 0;
        }
        for (i64 k = 0; k < experts; k++) {
            float *to = out + (k * blocks + block) * square;
            unpacked(packed[k] + block * size, width, weights[k], shrink, weights[k] / total, roots,
                     ours, own);
            for (i64 top = 0; top < width; top += TOGETHER) {
                const i64 count = least(TOGETHER, width - top);
                multiplied(own + top * width, count, sum, width, rows);
                for (i64 i = top; i < top + count; i++) {
                    const double left = roots[i] > 0 ? roots[i] : 1, *row = rows + (i - top) * width;
                    for (i64 j = 0; j < width; j++)
                        to[i * width + j] = left * row[j] / (roots[j] > 0 ? roots[j] : 1);
                }
            }
            if (!norms) continue;
            const double power = eighth_power(to, width, own, rows);
            norms[k] = power > norms[k] ? power : norms[k];
        }
    }
    return 0;
}
