/* The code of elements: differences to a base, or floats alone, by interleaved rANS.

   Owns the arithmetic of the payload that docs/format.md specifies ("Coded elements").  `encode`
   and `measure` trust their arguments.  `decode` and `check` check all that they read of a payload:
   none makes them read or write outside of what they were given.  Integers only, so that every
   processor gives the same bytes.

   rANS: Duda, arXiv 1311.2540; interleaved: Giesen, arXiv 1402.3392. */

#include "lanes.h"

enum {
    PROBABILITY_BITS = 10,
    WHOLE = 1 << PROBABILITY_BITS, /* the sum of the frequencies of a context */
    STATE_BITS = 32,
    CONTEXTS = 8, /* tables of all of them take two thirds of a first-level cache */
    SYMBOLS = 256,
    ESCAPE = SYMBOLS - 1,
    RAW = 16,        /* at most so many raw bits in a step */
    MANY = 128,      /* lanes of a block */
    FEW = 32,        /* lanes of a short block */
    SHORT = 1 << 14, /* a block of fewer elements is short */
    HEAD = 12,
    /* What follows is the encoder's choice; a reader need not know it. */
    SAMPLED = 1 << 13, /* at most so many elements tell contexts and raw bits, */
    RUN = 64,          /* so many in turn */
    RARE = 128,        /* contexts at either end have at least this part of the elements, */
    TABLE = 1024,      /* and about so many elements: a table takes some twenty bytes */
    OUTSIDE = 32,      /* at most this part of the elements is below the contexts */
    FEW_ESCAPES = 64,  /* if at most this part of the elements are escapes, none has raw bits */
    TYPICAL = 6,       /* else nine of ten symbols have so many bits */
    IS_ESCAPE = 1 << 26,
    COUNTED = 1024, /* of blocks with fewer rows, all symbols are counted */
    SELDOM = 16,    /* empty rows are listed if they are at least this part of all */
};

/* What the elements of a block are coded as. */
enum { ALONE, FLOATS, INTEGERS };

/* Which elements of a block have raw bits. */
enum { NO_RAW, ESCAPES_ONLY, RAW_BITS };

/* -- numbers and contexts ---------------------------------------------------------------------- */

/* How elements become numbers, and which context each has. */
typedef struct {
    u32 zeros;    /* so many low bits of all elements are zero, and left out */
    u32 bits;     /* of an element, without those */
    u32 contexts; /* 1 to CONTEXTS */
    u32 shift;    /* the class of an element of the base is its magnitude, without so many bits */
    u32 lowest;   /* the class of context 0, and of all below */
    u32 raw[CONTEXTS];
} Model;

INLINE u32 all_bits(const Model *own) { return 0xffffffffu >> (32 - own->bits); }

INLINE V context(const Model *own, Is base) {
    V class = ((V)base & (all_bits(own) >> 1)) >> own->shift;
    return least(most(class, (V)own->lowest) - own->lowest, (V)(own->contexts - 1));
}

INLINE u32 class_of(const Model *own, u32 base) {
    V found = context(own, (Is)(V)base);
    u32 classes[W];
    COPY(classes, &found, sizeof classes);
    return classes[0];
}

/* Elements in the order of their floats: negative ones with all other bits inverted.  Its own
   inverse. */
INLINE Is ordered(const Model *own, Is x) { return x ^ ((x >> 31) & (Is)(V)(all_bits(own) >> 1)); }

/* Which number an element has, given its base's: `bits` bits. */
INLINE V number(int mode, const Model *own, Is x, Is base) {
    const u32 unused = 32 - own->bits;
    if (mode == ALONE) {
        V all = (V)x & all_bits(own);
        return ((all << 1) | (all >> (own->bits - 1))) & all_bits(own);
    }
    V d = mode == FLOATS ? (V)ordered(own, x) - (V)ordered(own, base) : (V)x - (V)base;
    d <<= unused;
    return ((d << 1) ^ (V)((Is)d >> 31)) >> unused;
}

/* The difference that a number stands for. */
INLINE V difference(V z) { return (z >> 1) ^ ((V)0 - (z & 1)); }

/* The element of a number, or of a difference if it is not alone; higher bits are anything. */
INLINE V element(int mode, const Model *own, V z, Is base) {
    const u32 unused = 32 - own->bits;
    if (mode == ALONE) return (z >> 1) | (z << (own->bits - 1));
    if (mode == INTEGERS) return z + (V)base;
    V m = ((V)ordered(own, base) + z) << unused;
    return (V)ordered(own, (Is)m >> unused);
}

INLINE Model fixed(int width, const Model *given) {
    /* Let the compiler see what it may count on. */
    Model own = *given;
    if (width < 4) {
        own.zeros = 0;
        own.bits = 8 * width;
    }
    return own;
}

/* -- rows -------------------------------------------------------------------------------------- */

typedef struct {
    V class, number, raw_bits, symbol;
} Token;

INLINE Token token(int mode, const Model *own, int raw_bits, Is x, Is base) {
    Token made = {.class = mode == FLOATS ? context(own, base) : (V)0};
    made.number = number(mode, own, x, base);
    if (raw_bits != RAW_BITS) {
        made.raw_bits = 0;
        made.symbol = least(made.number, (V)ESCAPE);
        return made;
    }
    V k = mode == ALONE ? (V)own->raw[0] : lookup(own->raw, made.class);
    V symbol = least(((made.number - 1) >> k) + 1, (V)ESCAPE);
    Is is_zero = made.number == 0;
    made.raw_bits = is_zero ? 0 : k;
    made.symbol = is_zero ? 0 : symbol;
    return made;
}

/* Whether tables have differences in the place of symbols: -128 for an escape. */
INLINE int has_differences(int mode, int raw_bits) { return mode != ALONE && raw_bits != RAW_BITS; }

/* The number of an escape, as the tables have it. */
INLINE V told_by(int are_differences, V z) { return are_differences ? difference(z) : z; }

/* Decode a row of `lanes` elements. */
INLINE const u8 *decode_row(int width, int mode, int lanes, int raw_bits, const Model *own,
                            const u32 *table, const u8 *base, u8 *data, u32 *states,
                            const u8 *words) {
    enum { MOST = MANY / W };
    const int vectors = lanes / W, are_differences = has_differences(mode, raw_bits);
    const u32 escaped = are_differences ? (u32)-128 : ESCAPE;
    V x[MOST], entry[MOST], raws[MOST], more = 0;
    EVERY_VECTOR
    for (int v = 0; v < vectors; v++) {
        COPY(&x[v], states + v * W, sizeof(V));
        V at = x[v] & (WHOLE - 1);
        raws[v] = raw_bits == RAW_BITS ? own->raw[0] : 0;
        if (mode == FLOATS) {
            V class = context(own, load(width, base + v * W * width) >> own->zeros);
            at |= class << PROBABILITY_BITS;
            if (raw_bits == RAW_BITS) raws[v] = lookup(own->raw, class);
        }
        entry[v] = gather(table, at);
    }
    EVERY_VECTOR
    for (int v = 0; v < vectors; v++) {
        x[v] = (entry[v] & 2047) * (x[v] >> PROBABILITY_BITS) + ((entry[v] >> 11) & (WHOLE - 1));
        x[v] = refill(x[v], &words);
    }
    V z[MOST], escape[MOST];
    EVERY_VECTOR
    for (int v = 0; v < vectors; v++) {
        z[v] = are_differences ? (V)((Is)entry[v] >> 24) : entry[v] >> 24;
        escape[v] = 0;
        if (raw_bits == NO_RAW) continue;
        Is escapes = z[v] == escaped;
        if (raw_bits == ESCAPES_ONLY && !any(escapes)) continue;
        V count = escapes ? (V)own->bits : raws[v];
        if (raw_bits == RAW_BITS) count = z[v] == 0 ? 0 : count;
        V step = width < 4 ? count : least(count, (V)RAW);
        V raw = x[v] & ~((V)-1 << step);
        x[v] = refill(x[v] >> step, &words);
        if (width == 4) more |= count - step;
        if (raw_bits == RAW_BITS) {
            V whole = escapes ? 0 : ((z[v] - 1) << raws[v]) + 1;
            z[v] = z[v] == 0 ? 0 : whole + raw;
        } else if (width == 4)
            escape[v] = raw;
        else
            z[v] = escapes ? told_by(are_differences, raw) : z[v];
        if (width == 4) raws[v] = count - step;
    }
    if (raw_bits && width == 4 && any(more)) EVERY_VECTOR
    for (int v = 0; v < vectors; v++) {
        V raw = (x[v] & ~((V)-1 << raws[v])) << RAW;
        x[v] = refill(x[v] >> raws[v], &words);
        if (raw_bits == RAW_BITS)
            z[v] += raw;
        else
            escape[v] |= raw;
    }
    EVERY_VECTOR
    for (int v = 0; v < vectors; v++) {
        if (width == 4 && raw_bits == ESCAPES_ONLY)
            z[v] = z[v] == escaped ? told_by(are_differences, escape[v]) : z[v];
        if (mode != ALONE && !are_differences) z[v] = difference(z[v]);
        Is b = mode == ALONE ? (Is)0 : load(width, base + v * W * width) >> own->zeros;
        store(width, element(mode, own, z[v], b) << own->zeros, data + v * W * width);
        COPY(states + v * W, &x[v], sizeof(V));
    }
    return words;
}

/* Encode a row, whose decoding comes before that of what is encoded already. */
INLINE u8 *encode_row(int width, int mode, int lanes, int raw_bits, const Model *own,
                      const u32 *steps, const u32 *inverses, const u8 *data, const u8 *base,
                      u32 *states, u8 *words) {
    enum { MOST = MANY / W };
    const int vectors = lanes / W;
    V x[MOST], place[MOST], step[MOST], raw[MOST], count[MOST], longest = 0;
    EVERY_VECTOR
    for (int v = 0; v < vectors; v++) {
        Is b = mode == ALONE ? (Is)0 : load(width, base + v * W * width) >> own->zeros;
        Token made = token(mode, own, raw_bits, load(width, data + v * W * width) >> own->zeros, b);
        place[v] = made.class * SYMBOLS + made.symbol;
        step[v] = gather(steps, place[v]);
        if (raw_bits) {
            Is escapes = (step[v] & IS_ESCAPE) != 0;
            count[v] = escapes ? (V)own->bits : made.raw_bits;
            raw[v] = escapes ? made.number : (made.number - 1) & ~((V)-1 << made.raw_bits);
            longest |= count[v];
        }
        COPY(&x[v], states + v * W, sizeof(V));
    }
    if (raw_bits)
        for (int from = width == 4 ? RAW : 0; from >= 0; from -= RAW) {
            if (from && !any(longest >> 4)) continue;
            EVERY_VECTOR
            for (int v = vectors - 1; v >= 0; v--) {
                if (raw_bits == ESCAPES_ONLY && !any(count[v])) continue;
                V bits = width < 4 ? count[v] : least(most(count[v], (V)from) - from, (V)RAW);
                V part = (raw[v] >> from) & ~((V)-1 << bits);
                x[v] = emit(x[v], (x[v] >> 16) >> (RAW - bits) != 0, &words);
                x[v] = (x[v] << bits) | part;
            }
        }
    EVERY_VECTOR
    for (int v = vectors - 1; v >= 0; v--) {
        V f = step[v] & 2047;
        x[v] = emit(x[v], (x[v] >> (STATE_BITS - PROBABILITY_BITS)) >= f, &words);
        V quotient = high_product(x[v], gather(inverses, place[v])) >> ((step[v] >> 22) & 15);
        V rest = x[v] - quotient * f;
        /* The inverse is rounded up: now and then, the quotient is one too large. */
        Is is_less = (Is)rest < 0;
        rest = is_less ? rest + f : rest;
        quotient = is_less ? quotient - 1 : quotient;
        x[v] = (quotient << PROBABILITY_BITS) + rest + ((step[v] >> 11) & 2047);
        COPY(states + v * W, &x[v], sizeof(V));
    }
    return words;
}

/* -- scratch ----------------------------------------------------------------------------------- */

typedef struct {
    i64 result;
    Model model;
    u32 states[MANY];
    u8 row[2][4 * MANY];
    u16 places[MANY];
    u32 frequencies[CONTEXTS][SYMBOLS];
    union {
        struct {
            u32 table[CONTEXTS * WHOLE];
            u8 tail[2][8 * MANY + 64];
        };
        struct {
            u32 steps[CONTEXTS * SYMBOLS];
            u32 inverses[CONTEXTS * SYMBOLS];
            u32 counts[4][CONTEXTS * SYMBOLS];
            u8 sample[2][4 * SAMPLED];
            u32 classes[SYMBOLS];
            u32 lengths[CONTEXTS][64];
        };
    };
} Scratch;

_Static_assert(sizeof(Scratch) <= 200000, "the caller gives so much");

INLINE i64 lanes_of(i64 n) { return n < SHORT ? FEW : MANY; }
INLINE i64 smaller(i64 a, i64 b) { return a < b ? a : b; }

/* Return where a row lies whole: in place, or in scratch, filled up with zeros. */
INLINE const u8 *whole_row(int width, i64 lanes, i64 left, const u8 *at, u8 *room) {
    if (left >= lanes) return at;
    FILL(room, 0, lanes * width);
    COPY(room, at, left * width);
    return room;
}

INLINE int is_listed(const u8 *empties, i64 row) { return empties[row / 8] >> (row % 8) & 1; }

/* -- the model of a block ---------------------------------------------------------------------- */

/* Return how many low bits are zero in all elements of 4 bytes: the first that are not end it. */
static u32 zero_bits(i64 n, const u8 *data, const u8 *base) {
    u32 ones = 0;
    for (i64 start = 0; start < n && !(ones & 1); start += 1024) {
        i64 end = smaller(n, start + 1024);
        for (i64 j = start; j < end; j++) {
            u32 x;
            COPY(&x, data + 4 * j, 4);
            ones |= x;
            if (!base) continue;
            COPY(&x, base + 4 * j, 4);
            ones |= x;
        }
    }
    return ones ? smaller(__builtin_ctz(ones), 24) : 0;
}

/* Copy elements from all parts of a block; return how many. */
static i64 take_sample(int width, i64 n, const u8 *from, u8 *to) {
    i64 runs = n / RUN;
    if (runs > SAMPLED / RUN) runs = SAMPLED / RUN;
    if (runs < 2) {
        i64 all = smaller(n, RUN);
        COPY(to, from, all * width);
        return all;
    }
    for (i64 run = 0; run < runs; run++)
        COPY(to + run * RUN * width, from + run * (n - RUN) / (runs - 1) * width, RUN * width);
    return runs * RUN;
}

/* Choose the finest classes of which CONTEXTS in turn have nearly all elements of the sample.

   A context that few elements have would cost more than it saves. */
static void choose_contexts(i64 n, i64 sampled, Model *own, const Scratch *room) {
    i64 few = sampled / RARE;
    if (few < TABLE * sampled / n) few = TABLE * sampled / n;
    if (few < 1) few = 1;
    for (u32 more = 0; more < 8; more++) {
        u32 top = (SYMBOLS - 1) >> more;
        i64 above = 0;
        u32 high = top, low = 0;
        i64 mass[SYMBOLS];
        for (u32 class = 0; class <= top; class++)
            mass[class] = 0;
        for (u32 class = 0; class < SYMBOLS; class++)
            mass[class >> more] += room->classes[class];
        while (high > 0 && (above += mass[high]) < few)
            high--;
        i64 below = 0;
        while (low < high && (below += mass[low]) < few)
            low++;
        i64 outside = 0;
        for (u32 class = 0; class + CONTEXTS <= high; class++)
            outside += mass[class];
        if (outside * OUTSIDE > sampled && more < 7) continue;
        if (high >= CONTEXTS && low < high - (CONTEXTS - 1)) low = high - (CONTEXTS - 1);
        own->shift += more;
        own->lowest = low;
        own->contexts = high - low + 1;
        return;
    }
}

/* Choose how many raw bits each context has: none, if nearly all numbers are symbols without. */
static void choose_raw_bits(i64 sampled, Model *own, const Scratch *room) {
    i64 escapes = 0;
    for (u32 c = 0; c < own->contexts; c++)
        for (int length = 9; length <= 32; length++)
            escapes += room->lengths[c][length];
    if (escapes * FEW_ESCAPES <= sampled) return;
    for (u32 c = 0; c < own->contexts; c++) {
        i64 total = 0, below = 0;
        u32 bits = 0;
        for (int length = 0; length <= 32; length++)
            total += room->lengths[c][length];
        while (bits < 32 && (below += room->lengths[c][bits]) * 10 < total * 9)
            bits++;
        own->raw[c] = bits > TYPICAL ? bits - TYPICAL : 0;
    }
}

INLINE u32 element_at(int width, const u8 *from, i64 j) {
    u32 x = 0;
    COPY(&x, from + width * j, width);
    return x;
}

/* Choose the model of a block by a sample, which stays in scratch; return its elements. */
INLINE i64 choose_model(int width, int mode, i64 n, const u8 *data, const u8 *base, Scratch *room) {
    Model *own = &room->model;
    own->zeros = width == 4 ? zero_bits(n, data, mode == ALONE ? 0 : base) : 0;
    own->bits = 8 * width - own->zeros;
    own->contexts = 1;
    own->shift = own->lowest = 0;
    i64 sampled = take_sample(width, n, data, room->sample[0]);
    for (int c = 0; c < CONTEXTS; c++)
        own->raw[c] = 0;
    if (mode == ALONE) {
        own->raw[0] = own->bits - 8;
        return sampled;
    }
    take_sample(width, n, base, room->sample[1]);
    if (mode == FLOATS) {
        FILL(room->classes, 0, sizeof room->classes);
        /* The finest classes: SYMBOLS of them. */
        own->shift = own->bits > 9 ? own->bits - 9 : 0;
        for (i64 j = 0; j < sampled; j++) {
            u32 b = element_at(width, room->sample[1], j) >> own->zeros;
            room->classes[(b & (all_bits(own) >> 1)) >> own->shift]++;
        }
        choose_contexts(n, sampled, own, room);
    }
    FILL(room->lengths, 0, sizeof room->lengths);
    for (i64 first = 0; first < sampled; first += FEW) {
        const u8 *x =
            whole_row(width, FEW, sampled - first, room->sample[0] + first * width, room->row[0]);
        const u8 *b =
            whole_row(width, FEW, sampled - first, room->sample[1] + first * width, room->row[1]);
        for (int v = 0; v < FEW / W; v++) {
            Is base_of = load(width, b + v * W * width) >> own->zeros;
            V z = number(mode, own, load(width, x + v * W * width) >> own->zeros, base_of);
            V class = mode == FLOATS ? context(own, base_of) : (V)0;
            u32 zs[W], classes[W];
            COPY(zs, &z, sizeof zs);
            COPY(classes, &class, sizeof classes);
            for (int lane = 0; lane < W; lane++)
                room->lengths[classes[lane]][zs[lane] ? 32 - __builtin_clz(zs[lane]) : 0]++;
        }
    }
    choose_raw_bits(sampled, own, room);
    return sampled;
}

/* Whether the symbols of a row are counted: of a long block, those of every fourth, at random. */
INLINE int is_counted(i64 row, i64 rows) {
    return rows < COUNTED || (u32)row * 0x9e3779b1u >> 30 == 0;
}

/* Count symbols; return how many rows have no difference, and list these. */
INLINE i64 count_symbols(int width, int mode, i64 n, i64 lanes, const u8 *data, const u8 *base,
                         u8 *empties, Scratch *room) {
    const Model own = fixed(width, &room->model);
    i64 found = 0, rows = (n + lanes - 1) / lanes;
    FILL(room->counts, 0, sizeof room->counts);
    for (i64 first = 0, row = 0; row < rows; first += lanes, row++) {
        const u8 *x = whole_row(width, lanes, n - first, data + first * width, room->row[0]);
        const u8 *b = mode == ALONE
                          ? x
                          : whole_row(width, lanes, n - first, base + first * width, room->row[1]);
        V differences = 0;
        if (mode != ALONE)
            for (int v = 0; v < lanes / W; v++)
                differences |= (V)(load(width, x + v * W * width) ^ load(width, b + v * W * width));
        if (row % 8 == 0) empties[row / 8] = 0;
        if (mode != ALONE && !any(differences)) {
            empties[row / 8] |= 1 << (row % 8);
            found++;
            continue;
        }
        if (!is_counted(row, rows)) continue;
        for (int v = 0; v < lanes / W; v++) {
            Token made = token(mode, &own, RAW_BITS, load(width, x + v * W * width) >> own.zeros,
                               load(width, b + v * W * width) >> own.zeros);
            Is2 place = converted(made.class * SYMBOLS + made.symbol, Is2);
            COPY(room->places + v * W, &place, sizeof place);
        }
        for (int j = 0; j < lanes; j += 4)
            for (int lane = 0; lane < 4; lane++)
                room->counts[lane][room->places[j + lane]]++;
    }
    return found;
}

/* Count rows that are listed as empty: there are so few that they are coded like others. */
INLINE void count_empties(int width, int mode, i64 n, i64 lanes, const u8 *base, const u8 *empties,
                          Scratch *room) {
    const Model own = fixed(width, &room->model);
    const i64 rows = (n + lanes - 1) / lanes;
    for (i64 first = 0, row = 0; row < rows; first += lanes, row++) {
        if (!is_listed(empties, row) || !is_counted(row, rows)) continue;
        const u8 *b = whole_row(width, lanes, n - first, base + first * width, room->row[1]);
        for (i64 j = 0; j < lanes; j++) {
            u32 class = mode == FLOATS ? class_of(&own, element_at(width, b, j) >> own.zeros) : 0;
            room->counts[0][class * SYMBOLS]++;
        }
    }
}

/* Count the symbols of a block; return whether its empty rows are listed, and so not counted. */
INLINE int count_block(int width, int mode, i64 n, i64 lanes, const u8 *data, const u8 *base,
                       u8 *empties, Scratch *room) {
    const i64 rows = (n + lanes - 1) / lanes;
    i64 empty = count_symbols(width, mode, n, lanes, data, base, empties, room);
    int are_listed = empty > 0 && empty * SELDOM >= rows;
    if (empty && !are_listed) count_empties(width, mode, n, lanes, base, empties, room);
    for (int place = 0; place < CONTEXTS * SYMBOLS; place++)
        room->counts[0][place] +=
            room->counts[1][place] + room->counts[2][place] + room->counts[3][place];
    /* What was not counted may have any symbol: as an escape. */
    for (int c = 0; rows >= COUNTED && c < CONTEXTS; c++)
        room->counts[0][c * SYMBOLS + ESCAPE]++;
    return are_listed;
}

/* -- tables ------------------------------------------------------------------------------------ */

/* Count as escapes what is so rare that a slot of its own would cost more.

   A slot takes 1/1024 from all others, or 1/710 bits of each; an escape takes all bits of the
   number, and about three more than a rare symbol. */
static void drop_rare(const Model *own, u32 context, u32 *counts) {
    u64 total = 0;
    i64 more = (i64)own->bits - own->raw[context] - 3;
    for (int s = 0; s < SYMBOLS; s++)
        total += counts[s];
    for (int s = 0; s < ESCAPE; s++)
        if (counts[s] && more > 0 && counts[s] * (u64)more * 710 < total) {
            counts[ESCAPE] += counts[s];
            counts[s] = 0;
        }
}

/* Turn counts into frequencies with the sum WHOLE, none of them zero for a symbol that occurs. */
static void normalise(const u32 *counts, u32 *frequencies) {
    u64 total = 0;
    for (int s = 0; s < SYMBOLS; s++)
        total += counts[s];
    FILL(frequencies, 0, SYMBOLS * sizeof *frequencies);
    if (!total) {
        frequencies[0] = WHOLE;
        return;
    }
    i64 left = WHOLE;
    int largest = 0;
    for (int s = 0; s < SYMBOLS; s++) {
        if (!counts[s]) continue;
        u64 share = (counts[s] * (u64)WHOLE + total / 2) / total;
        frequencies[s] = share ? share : 1;
        left -= frequencies[s];
        if (counts[s] > counts[largest]) largest = s;
    }
    if (left > 0) frequencies[largest] += left;
    for (; left < 0; left++) {
        largest = 0;
        for (int s = 0; s < SYMBOLS; s++)
            if (frequencies[s] > frequencies[largest]) largest = s;
        frequencies[largest]--;
    }
}

static u8 *write_table(const u32 *frequencies, u8 *at) {
    int low = 0, high = SYMBOLS - 1;
    while (!frequencies[low])
        low++;
    while (!frequencies[high])
        high--;
    *at++ = low;
    *at++ = high;
    for (int s = low; s <= high; s++)
        if (!frequencies[s]) {
            int first = s;
            while (!frequencies[s + 1])
                s++;
            *at++ = 0;
            *at++ = s - first;
        } else if (frequencies[s] < 128)
            *at++ = frequencies[s];
        else {
            *at++ = 128 | (frequencies[s] & 127);
            *at++ = frequencies[s] >> 7;
        }
    return at;
}

/* Return where the table ends, or null if it is none. */
static const u8 *read_table(const u8 *at, const u8 *end, u32 *frequencies) {
    if (end - at < 2) return 0;
    int low = at[0], high = at[1];
    at += 2;
    FILL(frequencies, 0, SYMBOLS * sizeof *frequencies);
    u32 total = 0;
    for (int s = low; s <= high; s++) {
        if (at == end) return 0;
        u32 own = *at++;
        if (own == 0 || own >= 128) {
            if (at == end) return 0;
            if (own == 0) {
                if (s == low || (s += *at++) >= high) return 0;
                continue;
            }
            own = (own & 127) | (u32)*at++ << 7;
        }
        frequencies[s] = own;
        total += own;
    }
    return total == WHOLE ? at : 0;
}

/* A symbol of frequency f that begins at c takes x to x / f * WHOLE + x % f + c.  The division is a
   product with the inverse, rounded up (Granlund and Montgomery 1994), and a correction. */
static void prepare_encoding(const u32 *frequencies, u32 *steps, u32 *inverses) {
    u32 begin = 0;
    for (int s = 0; s < SYMBOLS; s++) {
        u32 f = frequencies[s], shift = 0;
        if (f < 2) {
            /* The quotient is x - 1, and the rest 1. */
            steps[s] = f | (begin + WHOLE - 1) << 11;
            inverses[s] = 0xffffffff;
        } else {
            while (f > 2u << shift)
                shift++;
            steps[s] = f | begin << 11 | shift << 22;
            inverses[s] = (((u64)1 << (32 + shift)) + f - 1) / f;
        }
        begin += f;
    }
    steps[ESCAPE] |= IS_ESCAPE;
    for (int s = 0; s < ESCAPE; s++)
        if (!frequencies[s]) {
            steps[s] = steps[ESCAPE];
            inverses[s] = inverses[ESCAPE];
        }
}

/* Each entry: the frequency, 11 bits; the place among those of its symbol, 10; the symbol, 8. */
static void prepare_decoding(int are_differences, const u32 *frequencies, u32 *table) {
    for (u32 s = 0; s < SYMBOLS; s++) {
        u32 told = are_differences ? (s >> 1) ^ (0 - (s & 1)) : s;
        for (u32 j = 0; j < frequencies[s]; j++)
            *table++ = told << 24 | j << 11 | frequencies[s];
    }
}

static u32 read32(const u8 *at) {
    u32 x;
    COPY(&x, at, 4);
    return x;
}

/* -- a block ----------------------------------------------------------------------------------- */

/* Which of the codes for rows a block needs; for short blocks there is one. */
INLINE int uses_raw(i64 lanes, const Model *own, const u32 frequencies[CONTEXTS][SYMBOLS]) {
    if (lanes == FEW) return RAW_BITS;
    int found = NO_RAW;
    for (u32 c = 0; c < own->contexts; c++)
        if (own->raw[c])
            return RAW_BITS;
        else if (frequencies[c][ESCAPE])
            found = ESCAPES_ONLY;
    return found;
}

#define BY_ROWS(lanes, raw_bits, call)                                                             \
    ((lanes) == FEW               ? call(FEW, RAW_BITS)                                            \
     : (raw_bits) == RAW_BITS     ? call(MANY, RAW_BITS)                                           \
     : (raw_bits) == ESCAPES_ONLY ? call(MANY, ESCAPES_ONLY)                                       \
                                  : call(MANY, NO_RAW))

INLINE u8 *encode_rows(int width, int mode, int lanes, int raw_bits, i64 n, const u8 *data,
                       const u8 *base, const u8 *empties, const u8 *begin, u8 *words,
                       Scratch *room) {
    const Model own = fixed(width, &room->model);
    u32 states[MANY];
    COPY(states, room->states, sizeof states);
    for (i64 row = (n + lanes - 1) / lanes - 1; row >= 0; row--) {
        if (empties && is_listed(empties, row)) continue;
        if (words - begin < 2 * (3 + 1) * lanes + 64) return 0;
        i64 first = row * lanes;
        const u8 *x = whole_row(width, lanes, n - first, data + first * width, room->row[0]);
        const u8 *b = mode == ALONE
                          ? x
                          : whole_row(width, lanes, n - first, base + first * width, room->row[1]);
        words = encode_row(width, mode, lanes, raw_bits, &own, room->steps, room->inverses, x, b,
                           states, words);
    }
    COPY(room->states, states, sizeof states);
    return words;
}

INLINE i64 encode_block(int width, int mode, i64 n, const u8 *data, const u8 *base, u8 *payload,
                        i64 capacity, Scratch *room) {
    const i64 lanes = lanes_of(n), rows = (n + lanes - 1) / lanes;
    const Model *own = &room->model;
    choose_model(width, mode, n, data, base, room);
    u8 *at = payload + HEAD;
    int are_listed = lanes == MANY ? count_block(width, mode, n, MANY, data, base, at, room)
                                   : count_block(width, mode, n, FEW, data, base, at, room);
    const u8 *empties = are_listed ? at : 0;
    if (empties) at += (rows + 7) / 8;
    for (u32 c = 0; c < own->contexts; c++)
        *at++ = own->raw[c];
    for (u32 c = 0; c < own->contexts; c++) {
        drop_rare(own, c, room->counts[0] + c * SYMBOLS);
        normalise(room->counts[0] + c * SYMBOLS, room->frequencies[c]);
        prepare_encoding(room->frequencies[c], room->steps + c * SYMBOLS,
                         room->inverses + c * SYMBOLS);
        at = write_table(room->frequencies[c], at);
    }
    for (int lane = 0; lane < MANY; lane++)
        room->states[lane] = LOW;
    u8 *end = payload + capacity;
#define ROWS(lanes, raw) encode_rows(width, mode, lanes, raw, n, data, base, empties, at, end, room)
    u8 *words = BY_ROWS(lanes, uses_raw(lanes, own, room->frequencies), ROWS);
#undef ROWS
    if (!words) return -1;
    __builtin_memmove(at, words, end - words);
    u32 count = (end - words) / 2;
    at += end - words;
    COPY(at, room->states, 4 * lanes);
    at += 4 * lanes;
    u8 head[HEAD] = {mode, own->zeros, own->contexts, own->shift, own->lowest, empties != 0};
    COPY(head + 8, &count, 4);
    COPY(payload, head, HEAD);
    return at - payload;
}

/* Decode rows; return whether words and states end as they should. */
INLINE int decode_rows(int width, int mode, int lanes, int raw_bits, i64 n, const u8 *words,
                       const u8 *end, const u8 *empties, const u8 *base, u8 *data, Scratch *room) {
    const Model own = fixed(width, &room->model);
    const i64 longest = 2 * (3 + 1) * lanes + 64;
    u32 states[MANY];
    COPY(states, room->states, sizeof states);
    int is_tail = 0;
    for (i64 first = 0, row = 0; first < n; first += lanes, row++) {
        i64 left = n - first;
        if (empties && is_listed(empties, row)) {
            COPY(data + first * width, base + first * width, smaller(left, lanes) * width);
            continue;
        }
        if (!is_tail && end - words < longest) {
            /* What is read behind the end is zero. */
            u8 *tail = room->tail[0];
            i64 size = end - words;
            FILL(tail, 0, sizeof room->tail);
            COPY(tail, words, size);
            words = tail;
            end = tail + size;
            is_tail = 1;
        }
        if (words > end) return 0;
        const u8 *b = mode == ALONE ? data : base + first * width;
        u8 *out = data + first * width;
        if (left < lanes) {
            b = mode == ALONE ? b : whole_row(width, lanes, left, b, room->row[1]);
            out = room->row[0];
        }
        words = decode_row(width, mode, lanes, raw_bits, &own, room->table, b, out, states, words);
        if (left < lanes) {
            COPY(data + first * width, out, left * width);
            for (i64 j = left * width; j < lanes * width; j++)
                if (out[j]) return 0;
        }
    }
    for (int lane = 0; lane < lanes; lane++)
        if (states[lane] != LOW) return 0;
    return words == end;
}

INLINE int decode_block(int width, int mode, i64 n, i64 length, const u8 *payload, const u8 *base,
                        u8 *data, Scratch *room) {
    const i64 lanes = lanes_of(n), rows = (n + lanes - 1) / lanes, listed = (rows + 7) / 8;
    if (length < HEAD + 4 * lanes || payload[0] != mode) return 0;
    Model *own = &room->model;
    own->zeros = payload[1];
    own->contexts = payload[2];
    own->shift = payload[3];
    own->lowest = payload[4];
    if (payload[5] > 1 || (mode == ALONE && payload[5]) || payload[6] || payload[7]) return 0;
    if (own->contexts < 1 || own->contexts > (mode == FLOATS ? CONTEXTS : 1)) return 0;
    if (own->zeros > (width == 4 ? 24 : 0)) return 0;
    own->bits = 8 * width - own->zeros;
    if (own->shift >= own->bits || (mode != FLOATS && (own->shift || own->lowest))) return 0;
    const u8 *at = payload + HEAD, *end = payload + length - 4 * lanes, *empties = 0;
    if (payload[5]) {
        if (end - at < listed) return 0;
        empties = at;
        at += listed;
        if (rows % 8 && at[-1] >> (rows % 8)) return 0;
    }
    if (end - at < own->contexts) return 0;
    FILL(own->raw, 0, sizeof own->raw);
    for (u32 c = 0; c < own->contexts; c++)
        if ((own->raw[c] = *at++) >= own->bits) return 0;
    for (u32 c = 0; c < own->contexts; c++) {
        at = read_table(at, end, room->frequencies[c]);
        if (!at) return 0;
    }
    const int raw_bits = uses_raw(lanes, own, room->frequencies);
    for (u32 c = 0; c < own->contexts; c++)
        prepare_decoding(has_differences(mode, raw_bits), room->frequencies[c],
                         room->table + c * WHOLE);
    if (end - at != 2 * (i64)read32(payload + 8)) return 0;
    FILL(room->states, 0, sizeof room->states);
    COPY(room->states, end, 4 * lanes);
    for (i64 lane = 0; lane < lanes; lane++)
        if (room->states[lane] < LOW) return 0;
#define ROWS(lanes, raw) decode_rows(width, mode, lanes, raw, n, at, end, empties, base, data, room)
    return BY_ROWS(lanes, raw_bits, ROWS);
#undef ROWS
}

/* -- estimates --------------------------------------------------------------------------------- */

/* log2(x) in 1/65536, nearly: the same on every processor. */
INLINE i64 logarithm(u32 x) {
    int whole = 31 - __builtin_clz(x);
    i64 part = (i64)(((u64)x << 16) >> whole) - 65536;
    return ((i64)whole << 16) + part + ((part * (65536 - part) >> 16) * 22545 >> 16);
}

/* Return about how many bytes a block takes, by a sample. */
INLINE i64 measure_block(int width, int mode, i64 n, const u8 *data, const u8 *base,
                         Scratch *room) {
    u8 empties[SAMPLED / FEW / 8];
    i64 sampled = choose_model(width, mode, n, data, base, room), rows = (sampled + FEW - 1) / FEW;
    i64 bits = 0, head = HEAD + 4 * lanes_of(n);
    if (count_block(width, mode, sampled, FEW, room->sample[0], room->sample[1], empties, room))
        bits = rows << 16;
    const Model *own = &room->model;
    for (u32 c = 0; c < own->contexts; c++) {
        u32 *counts = room->counts[0] + c * SYMBOLS;
        drop_rare(own, c, counts);
        normalise(counts, room->frequencies[c]);
        head += 3;
        for (int s = 0; s < SYMBOLS; s++) {
            if (!counts[s]) continue;
            head++;
            i64 raw = s == 0 ? 0 : s == ESCAPE ? own->bits : own->raw[c];
            i64 whole = (i64)(PROBABILITY_BITS + raw) << 16;
            bits += counts[s] * (whole - logarithm(room->frequencies[c][s]));
        }
    }
    return head + (bits >> 16) * n / (8 * sampled);
}

/* -- passes ------------------------------------------------------------------------------------ */

/* One of them is compiled at a time: the one whose name is defined.  They are called as numba's
   functions are, with places for a result and an exception, which stay; the result is in scratch.
 */
#define PASS int mstore_pass(void *returned, void *raised, i64 mode, i64 width, i64 n,

#define EACH(call)                                                                                 \
    switch (width * 4 + mode) {                                                                    \
        case 4 + ALONE:                                                                            \
            return call(1, ALONE);                                                                 \
        case 4 + FLOATS:                                                                           \
            return call(1, FLOATS);                                                                \
        case 4 + INTEGERS:                                                                         \
            return call(1, INTEGERS);                                                              \
        case 8 + ALONE:                                                                            \
            return call(2, ALONE);                                                                 \
        case 8 + FLOATS:                                                                           \
            return call(2, FLOATS);                                                                \
        case 8 + INTEGERS:                                                                         \
            return call(2, INTEGERS);                                                              \
        case 16 + ALONE:                                                                           \
            return call(4, ALONE);                                                                 \
        case 16 + FLOATS:                                                                          \
            return call(4, FLOATS);                                                                \
        case 16 + INTEGERS:                                                                        \
            return call(4, INTEGERS);                                                              \
        default:                                                                                   \
            return -1;                                                                             \
    }

#if defined(ENCODE)

static i64 encoded(i64 mode, i64 width, i64 n, i64 capacity, const u8 *data, const u8 *base,
                   u8 *payload, Scratch *room) {
#define CALL(width, mode) encode_block(width, mode, n, data, base, payload, capacity, room)
    EACH(CALL)
}

PASS i64 capacity, const u8 *data, const u8 *base, u8 *payload, Scratch *room) {
    room->result = encoded(mode, width, n, capacity, data, base, payload, room);
    return 0;
}

#elif defined(MEASURE)

static i64 measured(i64 mode, i64 width, i64 n, const u8 *data, const u8 *base, Scratch *room) {
#define CALL(width, mode) measure_block(width, mode, n, data, base, room)
    EACH(CALL)
}

PASS const u8 *data, const u8 *base, Scratch *room) {
    room->result = measured(mode, width, n, data, base, room);
    return 0;
}

#else

static i64 decoded(i64 mode, i64 width, i64 n, i64 length, const u8 *payload, const u8 *base,
                   u8 *data, Scratch *room) {
#define CALL(width, mode) decode_block(width, mode, n, length, payload, base, data, room)
    EACH(CALL)
}

#if defined(DECODE)

PASS i64 length, const u8 *payload, const u8 *base, u8 *data, Scratch *room) {
    room->result = decoded(mode, width, n, length, payload, base, data, room) > 0;
    return 0;
}

#else

/* Check: whether the payload decodes to `data`; it is decoded to `target`. */
PASS i64 length, const u8 *payload, const u8 *base, const u8 *data, u8 *target, Scratch *room) {
    room->result = decoded(mode, width, n, length, payload, base, target, room) > 0;
    if (!room->result) return 0;
    u8 differences = 0;
    for (i64 j = 0; j < width * n; j++)
        differences |= data[j] ^ target[j];
    room->result = !differences;
    return 0;
}

#endif
#endif
