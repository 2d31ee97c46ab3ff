/* History of memory, kept for lines of 64 bytes: a line is a few segments, each a set of bytes with the same history.
 *
 * An instruction first gathers its lanes into one mask a line, then each line is visited once. A segment that the mask
 * cuts is split; segments that have the same history afterwards are joined again. So coalesced accesses cost one visit a
 * line, whatever their width, and strided or narrow ones cost what their histories really differ in. */
#pragma once
#include "emu.h"

enum { LINE_BYTES = 64, LINES_PER_PAGE = 64, MAX_TOUCHED = 2 * LANES, NUM_READERS = 4 };

typedef struct { u32 id, clk, inst; } Access;
/* Global memory: the last write and the latest readers that were not ordered among themselves. */
typedef struct Cell { u32 w_id, w_clk, w_inst; u8 w_scope, w_atomic, next, pad; Access readers[NUM_READERS]; } Cell;
/* LDS: time is the workgroup's count of LDS operations. flags: 1 a load into LDS, 2 atomic. */
typedef struct LdsCell { u32 w_time, w_inst, r_time, r_inst; u16 readers; u8 w_wave, w_flags; } LdsCell;

typedef struct Segment { u64 mask; union { Cell global; LdsCell lds; }; } Segment;
typedef struct Line { u64 pending; u32 generation; u16 count, capacity; Segment *more; Segment first; } Line;
typedef struct ShadowPage { Line lines[LINES_PER_PAGE]; } ShadowPage;
typedef struct { Line *line; u64 address; } Touched;

static inline Segment *segment(Line *x, u32 k) { return k ? &x->more[k - 1] : &x->first; }
static inline void line_reset(Line *x, u32 generation) {
  x->generation = generation;
  x->count = 1;
  memset(&x->first, 0, sizeof x->first);
  x->first.mask = ~(u64)0;
}
static inline void line_touch(Line *x, u64 address, u64 mask, Touched *list, u32 *n) {
  if (!x->pending) list[(*n)++] = (Touched){x, address};
  x->pending |= mask;
}
static inline u64 bytes_mask(int bytes) { return bytes >= 64 ? ~(u64)0 : ((u64)1 << bytes) - 1; }
static inline Segment *line_append(Line *x) {
  if (x->count > x->capacity) {
    x->capacity = x->capacity ? (u16)(2 * x->capacity) : 4;
    x->more = realloc(x->more, x->capacity * sizeof(Segment));
  }
  return segment(x, x->count++);
}
typedef struct Use Use;
/* Visit the pending bytes of a line. */
static inline __attribute__((always_inline)) void line_visit(const Use *u, Line *x, void (*visit)(const Use *, Segment *)) {
  u64 mask = x->pending;
  u32 kept = x->count, first = ~0u;
  x->pending = 0;
  for (u32 k = 0; k < kept; k++) {
    Segment *s = segment(x, k);
    u64 both = s->mask & mask;
    if (!both) continue;
    if (both != s->mask) {
      Segment *part = line_append(x);
      s = segment(x, k); /* the list may have moved */
      *part = *s;
      s->mask &= ~both;
      part->mask = both;
      s = part;
    }
    visit(u, s);
    if (both == mask) return;
  }
  for (u32 k = 0; k < x->count; k++) { /* join what is alike now */
    Segment *s = segment(x, k);
    if (!(s->mask & mask)) continue;
    if (first == ~0u) { first = k; continue; }
    Segment *f = segment(x, first);
    if (memcmp(&f->global, &s->global, sizeof f->global)) continue;
    f->mask |= s->mask;
    *s = *segment(x, --x->count);
    k--;
  }
}
