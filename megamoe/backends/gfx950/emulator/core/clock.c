/* Vector clocks: per wave id, the number of its memory operations that are known. Absent entries are zero.
 *
 * Most waves know the same of most others, so clocks share chunks of 64 entries and copy one when they change it. */
#include "check.h"

static void chunk_drop(Chunk *x) { if (x && !__atomic_sub_fetch(&x->refs, 1, __ATOMIC_ACQ_REL)) free(x); }
static Chunk *chunk_share(Chunk *x) { __atomic_add_fetch(&x->refs, 1, __ATOMIC_RELAXED); return x; }
static void grow(Clock *a, u32 n) {
  if (n <= a->n) return;
  a->c = realloc(a->c, n * sizeof *a->c);
  memset(a->c + a->n, 0, (n - a->n) * sizeof *a->c);
  a->n = n;
}
/* A chunk of `a` that nobody else sees. */
static Chunk *own(Clock *a, u32 k) {
  Chunk *x = a->c[k];
  if (x && __atomic_load_n(&x->refs, __ATOMIC_ACQUIRE) == 1) return x;
  Chunk *y = calloc(1, sizeof *y);
  if (x) memcpy(y->v, x->v, sizeof y->v);
  y->refs = 1;
  chunk_drop(x);
  return a->c[k] = y;
}
void clock_set(Clock *a, u32 id, u32 value) {
  if (clock_get(a, id) >= value) return;
  grow(a, id / CHUNK + 1);
  own(a, id / CHUNK)->v[id % CHUNK] = value;
}
void clock_join(Clock *a, const Clock *b) {
  grow(a, b->n);
  for (u32 k = 0; k < b->n; k++) {
    Chunk *x = a->c[k], *y = b->c[k];
    if (!y || x == y) continue;
    u32 less = 0, more = 0;
    for (u32 i = 0; x && i < CHUNK; i++) { less |= x->v[i] < y->v[i]; more |= x->v[i] > y->v[i]; }
    if (x && !less) continue;
    if (!x || !more) { a->c[k] = chunk_share(y); chunk_drop(x); continue; }
    x = own(a, k);
    for (u32 i = 0; i < CHUNK; i++) x->v[i] = x->v[i] > y->v[i] ? x->v[i] : y->v[i];
  }
}
void clock_copy(Clock *a, const Clock *b) {
  clock_free(a);
  clock_join(a, b);
}
void clock_free(Clock *a) {
  for (u32 k = 0; k < a->n; k++) chunk_drop(a->c[k]);
  free(a->c);
  a->c = 0;
  a->n = 0;
}
void snapshot_drop(Snapshot *s) {
  if (!s || __atomic_sub_fetch(&s->refs, 1, __ATOMIC_ACQ_REL)) return;
  clock_free(&s->performed); clock_free(&s->agent); clock_free(&s->system);
  free(s);
}
