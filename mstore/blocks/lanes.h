/* Vectors of W lanes, for each kind of processor: clang's vector types, and what these lack.

   The code that includes this file is written once.  W is 16 with AVX-512, 8 with AVX2, else 1:
   then a vector is a number.  Lanes have 32 bits.  Nothing here checks an address. */

#include <stdint.h>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define W 16
#elif defined(__AVX2__)
#include <immintrin.h>
#define W 8
#else
#define W 1
#endif

#if W == 16
/* All states of a row stay in registers. */
#define EVERY_VECTOR _Pragma("clang loop unroll(full)")
#else
#define EVERY_VECTOR _Pragma("clang loop unroll(disable)")
#endif

#define INLINE static inline __attribute__((always_inline))

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int64_t i64;
#if W == 1
typedef u32 V;
typedef int32_t Is;
typedef int16_t Is2;
typedef int8_t Is1;
#define converted(x, type) ((type)(x))
#define any(x) __builtin_expect((x) != 0, 0)
#else
typedef u32 V __attribute__((ext_vector_type(W)));
typedef int32_t Is __attribute__((ext_vector_type(W)));
typedef int16_t Is2 __attribute__((ext_vector_type(W)));
typedef int8_t Is1 __attribute__((ext_vector_type(W)));
#define converted(x, type) __builtin_convertvector(x, type)
#define any(x) (__builtin_reduce_or(x) != 0)
#endif

/* A state of the coder has 32 bits, and between two steps it is at least that. */
#define LOW 0x10000

#define COPY __builtin_memcpy
#define FILL __builtin_memset

/* -- what differs between processors ----------------------------------------------------------- */

#if W == 16

INLINE V gather(const u32 *table, V at) { return (V)_mm512_i32gather_epi32((__m512i)at, table, 4); }

INLINE V lookup(const u32 *table, V at) {
    return (V)_mm512_permutexvar_epi32(
        (__m512i)at, _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)table)));
}

INLINE V refill(V x, const u8 **words) {
    __mmask16 low = _mm512_cmplt_epu32_mask((__m512i)x, _mm512_set1_epi32(LOW));
    __m512i next = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)*words));
    *words += 2 * __builtin_popcount(low);
    return (V)_mm512_mask_or_epi32((__m512i)x, low, _mm512_slli_epi32((__m512i)x, 16),
                                   _mm512_maskz_expand_epi32(low, next));
}

INLINE V emit(V x, Is is_high, u8 **words) {
    __mmask16 high = _mm512_movepi32_mask((__m512i)is_high);
    u32 count = __builtin_popcount(high);
    __m256i own = _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(high, (__m512i)x));
    *words -= 2 * count;
    _mm256_mask_storeu_epi16(*words, (__mmask16)((1u << count) - 1), own);
    return (V)_mm512_mask_srli_epi32((__m512i)x, high, (__m512i)x, 16);
}

#elif W == 8

/* For each mask: the place of each lane among those of the mask. */
#define RANK(m, i) __builtin_popcount((m) & ((1 << (i)) - 1))
#define RANKS(m)                                                                                   \
    {RANK(m, 0), RANK(m, 1), RANK(m, 2), RANK(m, 3), RANK(m, 4), RANK(m, 5), RANK(m, 6), RANK(m, 7)}
#define RANKS4(m) RANKS(m), RANKS((m) + 1), RANKS((m) + 2), RANKS((m) + 3)
#define RANKS16(m) RANKS4(m), RANKS4((m) + 4), RANKS4((m) + 8), RANKS4((m) + 12)
#define RANKS64(m) RANKS16(m), RANKS16((m) + 16), RANKS16((m) + 32), RANKS16((m) + 48)
static const u8 ranks[256][8] = {RANKS64(0), RANKS64(64), RANKS64(128), RANKS64(192)};

INLINE V gather(const u32 *table, V at) {
    return (V)_mm256_i32gather_epi32((const int *)table, (__m256i)at, 4);
}

INLINE V lookup(const u32 *table, V at) {
    return (V)_mm256_permutevar8x32_epi32(_mm256_loadu_si256((const __m256i *)table), (__m256i)at);
}

INLINE V refill(V x, const u8 **words) {
    __m256i is_low = _mm256_cmpeq_epi32(_mm256_srli_epi32((__m256i)x, 16), _mm256_setzero_si256());
    u32 low = _mm256_movemask_ps((__m256)is_low);
    __m256i next = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)*words));
    __m256i rank = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)ranks[low]));
    __m256i full =
        _mm256_or_si256(_mm256_slli_epi32((__m256i)x, 16), _mm256_permutevar8x32_epi32(next, rank));
    *words += 2 * __builtin_popcount(low);
    return (V)_mm256_blendv_epi8((__m256i)x, full, is_low);
}

#else

INLINE V gather(const u32 *table, V at) { return table[at]; }

INLINE V lookup(const u32 *table, V at) { return table[at]; }

INLINE V refill(V x, const u8 **words) {
    u16 next;
    COPY(&next, *words, sizeof next);
    int is_low = x < LOW;
    *words += 2 * is_low;
    return __builtin_unpredictable(is_low) ? x << 16 | next : x;
}

#endif

#if W < 16
INLINE V emit(V x, Is is_high, u8 **words) {
    for (int lane = W - 1; lane >= 0; lane--) {
#if W == 1
        u16 own = (u16)x;
        int step = is_high != 0;
#else
        u16 own = (u16)x[lane];
        int step = 1 & is_high[lane];
#endif
        COPY(*words - 2, &own, sizeof own);
        *words -= 2 * step;
    }
    return is_high ? x >> 16 : x;
}
#endif

INLINE V high_product(V a, V b) {
#if W == 1
    return (u32)((u64)a * b >> 32);
#else
    typedef u64 U __attribute__((ext_vector_type(W / 2)));
    const u64 lower = 0xffffffff;
    U even = ((U)a & lower) * ((U)b & lower), odd = ((U)a >> 32) * ((U)b >> 32);
    return (V)((even >> 32) | (odd & ~lower));
#endif
}

INLINE V least(V a, V b) { return a < b ? a : b; }
INLINE V most(V a, V b) { return a > b ? a : b; }

/* Elements of 1, 2 or 4 bytes, with their signs. */
INLINE Is load(int width, const u8 *at) {
    if (width == 1) {
        Is1 own;
        COPY(&own, at, sizeof own);
        return converted(own, Is);
    }
    if (width == 2) {
        Is2 own;
        COPY(&own, at, sizeof own);
        return converted(own, Is);
    }
    Is own;
    COPY(&own, at, sizeof own);
    return own;
}

/* The lowest bytes of each lane. */
INLINE void store(int width, V x, u8 *at) {
    if (width == 1) {
        Is1 own = converted(x, Is1);
        COPY(at, &own, sizeof own);
    } else if (width == 2) {
        Is2 own = converted(x, Is2);
        COPY(at, &own, sizeof own);
    } else
        COPY(at, &x, sizeof x);
}
