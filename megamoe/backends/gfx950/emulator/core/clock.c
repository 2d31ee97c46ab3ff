/* Vector clocks: per wave id, the number of its memory operations that are known. Absent entries are zero. */
#include "check.h"

void clock_set(Clock *a, u32 id, u32 value) {
  if (id >= a->n) {
    u32 n = (id + 64) / 64 * 64;
    a->c = realloc(a->c, 4 * n);
    memset(a->c + a->n, 0, 4 * (n - a->n));
    a->n = n;
  }
  if (a->c[id] < value) a->c[id] = value;
}
void clock_join(Clock *a, const Clock *b) {
  if (b->n > a->n) clock_set(a, b->n - 1, 0);
  for (u32 k = 0; k < b->n; k++) a->c[k] = a->c[k] > b->c[k] ? a->c[k] : b->c[k];
}
void clock_copy(Clock *a, const Clock *b) {
  a->c = realloc(a->c, 4 * b->n + 4);
  memcpy(a->c, b->c, 4 * b->n);
  a->n = b->n;
}
void clock_free(Clock *a) { free(a->c); a->c = 0; a->n = 0; }
void snapshot_drop(Snapshot *s) {
  if (!s || __atomic_sub_fetch(&s->refs, 1, __ATOMIC_ACQ_REL)) return;
  clock_free(&s->performed); clock_free(&s->agent); clock_free(&s->system);
  free(s);
}

