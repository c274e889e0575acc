/* Rows of blocks, copied from the leaf pages of LMDB's file (lmdb_pages.py has their form).

   `rows` trusts its addresses and lengths, and nothing in a page: number, kind and bounds of the
   page, and the place and lengths of each row, must be as the form has them, else it tells -1. */

#include "lanes.h"

enum {
    ID = 32,
    HEAD = 22,  /* a location without its base */
    LEAF = 2,
    PAGE = 16,  /* of a page, its own head */
    NODE = 8    /* of a row: lengths and flags */
};

INLINE u64 word(const u8 *at, int bytes) {
    u64 found = 0;
    COPY(&found, at, bytes);
    return found;
}

/* The rows of these pages, in order. ids, or heads, named and bases: where they go, or null; there
   is room for `most` rows. told: how many rows, and how many of them name a base. */
int mstore_pass(void *returned, void *raised, i64 pages, i64 size, i64 in_file, i64 most,
                const u8 *map, const i64 *numbers, u8 *ids, u8 *heads, u8 *named, u8 *bases,
                i64 *told) {
    i64 rows = 0, with_base = 0;
    told[0] = -1;
    for (i64 i = 0; i < pages; i++) {
        if (numbers[i] < 2 || numbers[i] >= in_file) return 0;
        const u8 *page = map + numbers[i] * size;
        i64 lower = word(page + 12, 2), upper = word(page + 14, 2);
        if (word(page, 8) != (u64)numbers[i] || word(page + 10, 2) != LEAF) return 0;
        if (lower < PAGE + 2 || lower > upper || upper > size || lower % 2) return 0;
        if (rows + (lower - PAGE) / 2 > most) return 0;
        for (i64 place = PAGE; place < lower; place += 2, rows++) {
            i64 at = word(page + place, 2);
            if (at < upper || at > size - NODE || at % 2) return 0;
            /* From low to high: length of the value, flags, length of the key. */
            u64 node = word(page + at, 8);
            i64 length = (i64)(node & 0xffffffff);
            int has_base = length == HEAD + ID;
            if (node >> 32 != ID << 16 || (length != HEAD && !has_base)) return 0;
            if (at + NODE + ID + length > size) return 0;
            const u8 *key = page + at + NODE, *value = key + ID;
            if (ids) COPY(ids + rows * ID, key, ID);
            if (!heads) continue;
            COPY(heads + rows * HEAD, value, HEAD);
            named[rows] = (u8)has_base;
            if (has_base) COPY(bases + with_base++ * ID, value + HEAD, ID);
        }
    }
    told[0] = rows;
    told[1] = with_base;
    return 0;
}
