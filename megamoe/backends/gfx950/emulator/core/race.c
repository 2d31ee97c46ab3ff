/* Races in global memory, by happens-before from what the ISA expresses.
 *
 * A plain access is ordered after a store of another workgroup when the storing side wrote back and waited
 * (buffer_wbl2, s_waitcnt), published with a scoped store or atomic, and this side loaded that flag with a scope, waited,
 * and invalidated (buffer_inv) or bypasses its caches itself. A store that carries the scope's cache bits needs no
 * write-back, only its waitcnt. A write after a read needs the read performed. Agent scope orders workgroups of one
 * rank, ranks need system scope. Inside a workgroup the barrier orders what was issued. */
#include "check.h"

static u64 shadow_pages(const Alloc *a) { return (a->size + LINE_BYTES * LINES_PER_PAGE - 1) / (LINE_BYTES * LINES_PER_PAGE); }
void check_begin(Machine *m) {
  m->races = calloc(1, sizeof(RaceState));
  m->races->generation = 1;
}

/* Launches: clock[0] is what every wave knows at its start, clock[1] gathers what is known at its end. */
void check_launch_start(Machine *m, Launch *l) {
  if (!l->clock) l->clock = calloc(2, sizeof *l->clock);
  for (u32 k = 0; k < l->num_deps; k++) { Launch *d = m->launches[l->deps[k]]; if (d->clock) clock_join(&l->clock[0], &d->clock[1]); }
  for (u32 k = 0; k < m->num_launches && k < l->id; k++) /* what the host saw done when it queued this launch */
    if (m->launches[k]->done && m->launches[k]->clock && m->launches[k]->done_before <= l->id) clock_join(&l->clock[0], &m->launches[k]->clock[1]);
}
void check_launch_end(Machine *m, Launch *l) {
  if (l->clock) clock_join(&l->clock[1], &l->clock[0]); /* its waves kept only what they learnt beyond it */
  l->done_before = m->num_launches;
}
/* The waves of a workgroup have consecutive ids. */
void check_reserve_ids(Machine *m, Group *g) {
  RaceState *r = m->races;
  pthread_mutex_lock(&m->race_lock);
  while (r->num_ids + g->num_waves > r->cap_ids) { r->cap_ids = r->cap_ids ? 2 * r->cap_ids : 256; r->ids = realloc(r->ids, r->cap_ids * sizeof *r->ids); }
  g->first_wave_id = r->num_ids;
  for (u32 k = 0; k < g->num_waves; k++) r->ids[r->num_ids++] = (WaveInfo){g->launch->id, g->flat_id, k, g->launch->rank, g->first_wave_id, g->num_waves};
  pthread_mutex_unlock(&m->race_lock);
}
void check_wave_start(Wave *w) {
  WaveCheck *c = w->chk = calloc(1, sizeof *c);
  c->id = w->group->first_wave_id + w->idx;
  c->slot = w->idx % MAX_MATES;
  c->base = w->launch->clock ? &w->launch->clock[0] : 0;
}
void check_wave_end(Wave *w) {
  WaveCheck *c = w->chk;
  Launch *l = w->launch;
  if (!l->clock) l->clock = calloc(2, sizeof *l->clock);
  clock_join(&l->clock[1], &c->known);
  clock_set(&l->clock[1], c->id, ~0u);
  for (int q = 0; q < 2; q++) for (u32 k = 0; k < c->size[q]; k++) snapshot_drop(c->queue[q][(c->head[q] + k) % MAX_PENDING].acquired);
  snapshot_drop(c->pending_load);
  snapshot_drop(c->last_acquired);
  clock_free(&c->known); clock_free(&c->acquired); clock_free(&c->performed);
  free(c);
  w->chk = 0;
}
/* Nothing is in flight: everything that happened is ordered before everything to come. */
void check_quiet(Machine *m) {
  RaceState *r = m->races;
  r->generation++;
  r->num_ids = 0;
  for (u32 k = 0; k < m->num_launches; k++) {
    Launch *l = m->launches[k];
    if (l->clock) { clock_free(&l->clock[0]); clock_free(&l->clock[1]); free(l->clock); l->clock = 0; }
  }
  for (u32 k = 0; k < r->cap_flags; k++) { snapshot_drop(r->flags[k].s); r->flags[k].s = 0; r->flags[k].address = 0; }
  r->num_flags = 0;
}
void check_free(Machine *m) {
  check_quiet(m);
  free(m->races->ids); free(m->races->flags); free(m->races);
  m->races = 0;
}
void free_shadow(Alloc *a) {
  if (!a->pages) return;
  for (u64 p = 0; p < shadow_pages(a); p++) {
    if (!a->pages[p]) continue;
    for (int k = 0; k < LINES_PER_PAGE; k++) free(a->pages[p]->lines[k].more);
    free(a->pages[p]);
  }
  free(a->pages);
  a->pages = 0;
}

/* A memory operation of this wave is complete: its waitcnt is done. */
void race_complete(Wave *w, Pending *p) {
  WaveCheck *c = w->chk;
  if (c->level[LV_PERFORMED][c->slot] < p->seq) c->level[LV_PERFORMED][c->slot] = p->seq;
  if (p->acquired && p->acquired != c->last_acquired) { /* a poll that sees the same store again teaches nothing */
    Snapshot *s = p->acquired;
    int same = s->rank == w->launch->rank;
    clock_join(&c->performed, &s->performed);
    clock_join(&c->acquired, same ? &s->agent : &s->system);
    u32 need = same ? SCOPE_AGENT : SCOPE_SYSTEM;
    if (c->acquired_scope < need) c->acquired_scope = need;
    w->group->chk->news = 1;
    snapshot_drop(c->last_acquired);
    c->last_acquired = s;
    p->acquired = 0; /* the reference moves */
  }
  if (p->counters & CNT_FENCE_REL && p->fence_scope >= SCOPE_AGENT)
    for (int level = LV_AGENT; level <= (p->fence_scope == SCOPE_SYSTEM ? LV_SYSTEM : LV_AGENT); level++)
      for (u32 k = 0; k < MAX_MATES; k++) {
        u32 seq = k == c->slot ? p->seq : p->performed_at_issue[k];
        if (c->level[level][k] < seq) c->level[level][k] = seq;
      }
}
void check_fence(Wave *w, const Inst *i, int release, int scope) {
  WaveCheck *c = w->chk;
  (void)i;
  if (release || !c->acquired.n || (u32)scope < c->acquired_scope) return;
  clock_join(&c->known, &c->acquired);
  for (u32 k = 0; k < w->group->num_waves && k < MAX_MATES; k++) {
    u32 v = clock_get(&c->known, w->group->first_wave_id + k);
    for (int level = 0; level < NUM_LEVELS; level++) if (c->level[level][k] < v) c->level[level][k] = v;
  }
  clock_free(&c->acquired);
  c->acquired_scope = 0;
  w->group->chk->news = 1;
}
/* Everybody of the workgroup is at the barrier: what one knew, all know. */
void check_barrier(Group *g) {
  u32 top[NUM_LEVELS][MAX_MATES] = {{0}}, scope = 0;
  Clock known = {0}, acquired = {0}, performed = {0};
  struct LdsCheck *lds = g->chk;
  for (u32 k = 0; k < g->num_waves; k++) {
    if (!g->waves[k]) continue;
    WaveCheck *c = g->waves[k]->chk;
    c->level[LV_SEEN][c->slot] = c->seq;
    lds->known[0][c->slot] = lds_done(g->waves[k]);
    lds->known[1][c->slot] = c->dma_done;
    for (int level = 0; level < NUM_LEVELS; level++) for (u32 m = 0; m < MAX_MATES; m++) if (top[level][m] < c->level[level][m]) top[level][m] = c->level[level][m];
    if (lds->news) { clock_join(&known, &c->known); clock_join(&acquired, &c->acquired); clock_join(&performed, &c->performed); if (scope < c->acquired_scope) scope = c->acquired_scope; }
  }
  for (u32 k = 0; k < g->num_waves; k++) {
    if (!g->waves[k]) continue;
    WaveCheck *c = g->waves[k]->chk;
    memcpy(c->level, top, sizeof top);
    if (lds->news) { clock_copy(&c->known, &known); clock_copy(&c->acquired, &acquired); clock_copy(&c->performed, &performed); c->acquired_scope = scope; }
  }
  clock_free(&known); clock_free(&acquired); clock_free(&performed);
  lds->news = 0;
}

/* One access against the history of some bytes. */
struct Use { Wave *w; const Inst *i; u64 address; int write, sync, scope; };
static int needed_scope(const Wave *w, const WaveInfo *o, u32 id) {
  if (id - w->group->first_wave_id < w->group->num_waves) return SCOPE_GROUP;
  return o->rank == w->launch->rank ? SCOPE_AGENT : SCOPE_SYSTEM;
}
static int knows(const Use *u, const Cell *x, u32 id, u32 clk, int is_read, int need) {
  const WaveCheck *c = u->w->chk;
  if (need == SCOPE_GROUP) return c->level[LV_SEEN][id - u->w->group->first_wave_id] >= clk;
  if (clock_get(&c->known, id) >= clk || (c->base && clock_get(c->base, id) >= clk)) return 1;
  if ((is_read || u->write || u->scope >= need) && clock_get(&c->acquired, id) >= clk) return 1;
  return (is_read || x->w_scope >= need) && clock_get(&c->performed, id) >= clk;
}
static void visit_global(const Use *u, Segment *s) {
  Wave *w = u->w;
  Cell *x = &s->global;
  RaceState *r = w->machine->races;
  WaveCheck *c = w->chk;
  u32 clk = c->seq + 1, inst = (u32)(u->i - w->launch->prog);
  u64 address = u->address + (u64)__builtin_ctzll(s->mask);
  if (x->w_clk && x->w_id != c->id) {
    const WaveInfo *o = &r->ids[x->w_id];
    int need = needed_scope(w, o, x->w_id), ok;
    if (u->sync && x->w_atomic) ok = need == SCOPE_GROUP || (u->scope >= need && x->w_scope >= need);
    else ok = knows(u, x, x->w_id, x->w_clk, 0, need);
    if (!ok) { add_finding(w, u->i, FOUND_GLOBAL_RACE, address, o->launch, o->group, o->wave, x->w_inst, 1); x->w_clk = 0; }
  }
  if (!u->write) {
    if (u->sync) return;
    if (x->readers[0].id == c->id || !x->readers[0].clk) { x->readers[0] = (Access){c->id, clk, inst}; return; }
    int slot = -1;
    for (int k = 0; k < NUM_READERS; k++) {
      Access *a = &x->readers[k];
      if (a->clk && a->id == c->id) { slot = k; break; }
      if (slot < 0 && (!a->clk || knows(u, x, a->id, a->clk, 1, needed_scope(w, &r->ids[a->id], a->id)))) slot = k;
    }
    if (slot < 0) slot = x->next++ % NUM_READERS; /* the four latest unordered readers are kept */
    x->readers[slot] = (Access){c->id, clk, inst};
    return;
  }
  for (int k = 0; k < NUM_READERS; k++) {
    Access *a = &x->readers[k];
    if (!a->clk || a->id == c->id) continue;
    const WaveInfo *o = &r->ids[a->id];
    if (!knows(u, x, a->id, a->clk, 1, needed_scope(w, o, a->id))) { add_finding(w, u->i, FOUND_GLOBAL_RACE, address, o->launch, o->group, o->wave, a->inst, 0); break; }
  }
  *x = (Cell){.w_id = c->id, .w_clk = clk, .w_inst = inst, .w_scope = (u8)u->scope, .w_atomic = (u8)u->sync};
}
static inline void touch(RaceState *r, Alloc *a, u64 line, u64 mask, Touched *list, u32 *n) {
  ShadowPage **page = &a->pages[line / LINES_PER_PAGE];
  if (!*page) *page = calloc(1, sizeof **page);
  Line *x = &(*page)->lines[line % LINES_PER_PAGE];
  if (x->generation != r->generation) line_reset(x, r->generation);
  line_touch(x, a->base + line * LINE_BYTES, mask, list, n);
}
void check_global(Wave *w, const Inst *i, const u64 *address, u64 exec, int bytes, int write, int atomic, int scope) {
  Machine *m = w->machine;
  if (!(m->detect & DETECT_GLOBAL)) return;
  RaceState *r = m->races;
  Touched list[MAX_TOUCHED];
  u32 n = 0, cached = w->launch->alloc_cache[i - w->launch->prog];
  Alloc *a = cached < m->num_allocs ? &m->allocs[cached] : 0;
  u64 mask = bytes_mask(bytes);
  for (; exec; exec &= exec - 1) {
    u64 at = address[__builtin_ctzll(exec)];
    if (!a || at < a->base || at >= a->base + a->size) a = find_alloc(m, at);
    if (!a || a->read_only) continue;
    if (!a->pages) a->pages = calloc(shadow_pages(a), sizeof *a->pages);
    u64 line = (at - a->base) / LINE_BYTES, in = (at - a->base) % LINE_BYTES;
    touch(r, a, line, mask << in, list, &n);
    if (in + (u64)bytes > LINE_BYTES) touch(r, a, line + 1, mask >> (LINE_BYTES - in), list, &n);
  }
  Use u = {w, i, 0, write, atomic || (scope >= SCOPE_AGENT && bytes <= 8), scope};
  Snapshot *own = u.sync && write ? snapshot_of(w, scope) : 0;
  for (u32 k = 0; k < n; k++) {
    u64 bytes_hit = list[k].line->pending;
    u.address = list[k].address;
    line_visit(&u, list[k].line, visit_global);
    for (int d = 0; u.sync && d < LINE_BYTES; d += 4) {
      if (!(bytes_hit >> d & 15)) continue;
      if (atomic || !write) acquire(w, list[k].address + (u64)d);
      if (write) publish(w, list[k].address + (u64)d, own, atomic);
    }
  }
  snapshot_drop(own);
}
