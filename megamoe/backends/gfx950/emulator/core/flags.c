/* Flags: what a wave that publishes knows, kept by the address of the flag until a wave that loads it acquires it. */
#include "check.h"

/* Flags: address of a dword to the snapshot that its last scoped store published. */
static Flag *flag_of(RaceState *r, u64 address, int make) {
  if (make && 2 * r->num_flags >= r->cap_flags) {
    u32 old = r->cap_flags;
    Flag *from = r->flags;
    r->cap_flags = old ? 2 * old : 256;
    r->flags = calloc(r->cap_flags, sizeof(Flag));
    for (u32 k = 0; k < old; k++) if (from[k].address) *flag_of(r, from[k].address, 0) = from[k];
    free(from);
  }
  if (!r->cap_flags) return 0;
  u32 at = (u32)((address >> 2) * 0x9e3779b97f4a7c15ull >> 40) & (r->cap_flags - 1);
  while (r->flags[at].address && r->flags[at].address != address) at = (at + 1) & (r->cap_flags - 1);
  if (!r->flags[at].address && make) { r->flags[at].address = address; r->num_flags++; }
  return &r->flags[at];
}
static void with_mates(Clock *a, const Wave *w, int level) {
  const WaveCheck *c = w->chk;
  for (u32 k = 0; k < w->group->num_waves && k < MAX_MATES; k++) if (c->level[level][k]) clock_set(a, w->group->first_wave_id + k, c->level[level][k]);
}
/* What this wave may pass on with a store of `scope`. */
Snapshot *snapshot_of(Wave *w, int scope) {
  Snapshot *s = calloc(1, sizeof *s);
  WaveCheck *c = w->chk;
  s->refs = 1;
  s->rank = w->launch->rank;
  clock_copy(&s->agent, &c->known);
  if (c->base) clock_join(&s->agent, c->base);
  clock_copy(&s->performed, &s->agent);
  if (scope == SCOPE_SYSTEM) { clock_copy(&s->system, &s->agent); with_mates(&s->system, w, LV_SYSTEM); }
  with_mates(&s->agent, w, LV_AGENT);
  clock_join(&s->performed, &c->acquired);
  clock_join(&s->performed, &c->performed);
  with_mates(&s->performed, w, LV_PERFORMED);
  return s;
}
static Snapshot *joined(const Snapshot *a, const Snapshot *b) {
  Snapshot *s = calloc(1, sizeof *s);
  s->refs = 1;
  s->rank = a->rank == b->rank ? a->rank : -2;
  const Snapshot *from[2] = {a, b};
  for (int k = 0; k < 2; k++) { clock_join(&s->performed, &from[k]->performed); clock_join(&s->agent, &from[k]->agent); clock_join(&s->system, &from[k]->system); }
  return s;
}
/* A plain store starts a new history of the flag, a read-modify-write goes on with the old one. */
void publish(Wave *w, u64 address, Snapshot *own, int rmw) {
  Flag *f = flag_of(w->machine->races, address, 1);
  Snapshot *old = f->s;
  if (rmw && old) f->s = joined(own, old);
  else { f->s = own; __atomic_add_fetch(&own->refs, 1, __ATOMIC_RELAXED); }
  snapshot_drop(old);
}
void acquire(Wave *w, u64 address) {
  Flag *f = flag_of(w->machine->races, address, 0);
  if (!f || !f->address || !f->s) return;
  WaveCheck *c = w->chk;
  if (c->pending_load == f->s) return;
  Snapshot *old = c->pending_load;
  if (old) { c->pending_load = joined(old, f->s); snapshot_drop(old); return; } /* one load instruction read several flags */
  c->pending_load = f->s;
  __atomic_add_fetch(&f->s->refs, 1, __ATOMIC_RELAXED);
}
