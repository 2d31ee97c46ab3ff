/* Races in global memory, by happens-before from what the ISA expresses.
 *
 * A plain access is ordered after a store of another workgroup when the storing side wrote back and waited
 * (buffer_wbl2, s_waitcnt), published with a scoped store or atomic, and this side loaded that flag with a scope, waited,
 * and invalidated (buffer_inv) or bypasses its caches itself. A store that carries the scope's cache bits needs no
 * write-back, only its waitcnt. A write after a read needs the read performed. Agent scope orders workgroups of one
 * rank, ranks need system scope. Inside a workgroup the barrier orders what was issued. */
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
  if (!s || --s->refs) return;
  clock_free(&s->performed); clock_free(&s->agent); clock_free(&s->system);
  free(s);
}

static RaceState *state(Machine *m) { if (!m->races) { m->races = calloc(1, sizeof(RaceState)); m->races->generation = 1; } return m->races; }

/* Launches: clock[0] is what every wave knows at its start, clock[1] gathers what is known at its end. */
void check_launch_start(Machine *m, Launch *l) {
  if (!l->clock) l->clock = calloc(2, sizeof *l->clock);
  for (u32 k = 0; k < l->num_deps; k++) { Launch *d = m->launches[l->deps[k]]; if (d->clock) clock_join(&l->clock[0], &d->clock[1]); }
  for (u32 k = 0; k < m->num_launches && k < l->id; k++) /* what the host saw done when it queued this launch */
    if (m->launches[k]->done && m->launches[k]->clock && m->launches[k]->done_before <= l->id) clock_join(&l->clock[0], &m->launches[k]->clock[1]);
}
void check_launch_end(Machine *m, Launch *l) { l->done_before = m->num_launches; }
void check_wave_start(Wave *w) {
  Machine *m = w->machine;
  RaceState *r = state(m);
  WaveCheck *c = w->chk = calloc(1, sizeof *c);
  if (r->num_ids == r->cap_ids) { r->cap_ids = r->cap_ids ? 2 * r->cap_ids : 256; r->ids = realloc(r->ids, r->cap_ids * sizeof *r->ids); }
  c->id = r->num_ids++;
  c->slot = w->idx % MAX_MATES;
  if (!w->idx) w->group->first_wave_id = c->id;
  r->ids[c->id] = (WaveInfo){w->launch->id, w->group->flat_id, w->idx, w->launch->rank, w->group->first_wave_id, w->group->num_waves};
  if (w->launch->clock) clock_copy(&c->known, &w->launch->clock[0]);
}
void check_wave_end(Wave *w) {
  WaveCheck *c = w->chk;
  Launch *l = w->launch;
  if (!l->clock) l->clock = calloc(2, sizeof *l->clock);
  clock_join(&l->clock[1], &c->known);
  clock_set(&l->clock[1], c->id, ~0u);
  for (int q = 0; q < 2; q++) for (u32 k = 0; k < c->size[q]; k++) snapshot_drop(c->queue[q][(c->head[q] + k) % MAX_PENDING].acquired);
  snapshot_drop(c->pending_load);
  clock_free(&c->known); clock_free(&c->acquired); clock_free(&c->performed);
  free(c);
  w->chk = 0;
}
/* Nothing is in flight: everything that happened is ordered before everything to come. */
void check_quiet(Machine *m) {
  RaceState *r = state(m);
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
  for (u64 p = 0; p < (a->size + 1027) / 1024; p++) {
    if (!a->pages[p]) continue;
    for (int k = 0; k < 256; k++) free(a->pages[p]->sub[k]);
    free(a->pages[p]);
  }
  free(a->pages);
  a->pages = 0;
}

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
static void publish(Wave *w, u64 address, int scope, int rmw) {
  Flag *f = flag_of(state(w->machine), address & ~(u64)3, 1);
  Snapshot *old = f->s, *s = calloc(1, sizeof *s);
  WaveCheck *c = w->chk;
  s->refs = 1;
  s->scope = (u32)scope;
  s->rank = w->launch->rank;
  clock_copy(&s->performed, &c->known);
  clock_join(&s->performed, &c->acquired);
  clock_join(&s->performed, &c->performed);
  with_mates(&s->performed, w, LV_PERFORMED);
  clock_copy(&s->agent, &c->known);
  with_mates(&s->agent, w, LV_AGENT);
  if (scope == SCOPE_SYSTEM) { clock_copy(&s->system, &c->known); with_mates(&s->system, w, LV_SYSTEM); }
  if (rmw && old) {
    clock_join(&s->performed, &old->performed);
    clock_join(&s->agent, &old->agent);
    clock_join(&s->system, &old->system);
    if (old->rank != s->rank) s->rank = -2;
  }
  snapshot_drop(old);
  f->s = s;
}
static void acquire(Wave *w, u64 address) {
  Flag *f = flag_of(state(w->machine), address & ~(u64)3, 0);
  if (!f || !f->address || !f->s) return;
  WaveCheck *c = w->chk;
  if (!c->pending_load) { c->pending_load = f->s; f->s->refs++; return; }
  if (c->pending_load == f->s) return;
  Snapshot *s = calloc(1, sizeof *s); /* one load instruction read several flags */
  s->refs = 1;
  s->rank = c->pending_load->rank == f->s->rank ? f->s->rank : -2;
  const Snapshot *from[2] = {c->pending_load, f->s};
  for (int k = 0; k < 2; k++) { clock_join(&s->performed, &from[k]->performed); clock_join(&s->agent, &from[k]->agent); clock_join(&s->system, &from[k]->system); }
  snapshot_drop(c->pending_load);
  c->pending_load = s;
}
/* A memory operation of this wave is complete: its waitcnt is done. */
void race_complete(Wave *w, Pending *p) {
  WaveCheck *c = w->chk;
  if (c->level[LV_PERFORMED][c->slot] < p->seq) c->level[LV_PERFORMED][c->slot] = p->seq;
  if (p->acquired) {
    const Snapshot *s = p->acquired;
    int same = s->rank == w->launch->rank;
    clock_join(&c->performed, &s->performed);
    clock_join(&c->acquired, same ? &s->agent : &s->system);
    u32 need = same ? SCOPE_AGENT : SCOPE_SYSTEM;
    if (c->acquired_scope < need) c->acquired_scope = need;
    w->group->chk->news = 1;
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

/* One access against the history of its cell. */
typedef struct { Wave *w; const Inst *i; u64 address; int write, sync, scope; } Use;
static int needed_scope(const Wave *w, const WaveInfo *o, u32 id) {
  if (id - w->group->first_wave_id < w->group->num_waves) return SCOPE_GROUP;
  return o->rank == w->launch->rank ? SCOPE_AGENT : SCOPE_SYSTEM;
}
static int knows(const Use *u, const Cell *x, u32 id, u32 clk, int is_read, int need) {
  const WaveCheck *c = u->w->chk;
  if (need == SCOPE_GROUP) return c->level[LV_SEEN][id - u->w->group->first_wave_id] >= clk;
  u32 k = clock_get(&c->known, id);
  if (k < clk && (is_read || u->write || u->scope >= need)) k = clock_get(&c->acquired, id);
  if (k < clk && (is_read || x->w_scope >= need)) k = clock_get(&c->performed, id);
  return k >= clk;
}
static void visit(const Use *u, Cell *x) {
  Wave *w = u->w;
  RaceState *r = w->machine->races;
  WaveCheck *c = w->chk;
  u32 on = w->machine->detect & DETECT_GLOBAL, clk = c->seq + 1, inst = (u32)(u->i - w->launch->prog);
  if (x->generation != r->generation) { u8 split = x->split; memset(x, 0, sizeof *x); x->generation = r->generation; x->split = split; }
  if (x->w_clk && x->w_id != c->id && on) {
    const WaveInfo *o = &r->ids[x->w_id];
    int need = needed_scope(w, o, x->w_id), ok = u->sync && x->w_atomic ? u->scope >= need && x->w_scope >= need : knows(u, x, x->w_id, x->w_clk, 0, need);
    if (need == SCOPE_GROUP && u->sync && x->w_atomic) ok = 1;
    if (!ok) { add_finding(w, u->i, FOUND_GLOBAL_RACE, u->address, o->launch, o->group, o->wave, x->w_inst, 1); x->w_clk = 0; }
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
  for (int k = 0; k < NUM_READERS && on; k++) {
    Access *a = &x->readers[k];
    if (!a->clk || a->id == c->id) continue;
    const WaveInfo *o = &r->ids[a->id];
    if (!knows(u, x, a->id, a->clk, 1, needed_scope(w, o, a->id))) { add_finding(w, u->i, FOUND_GLOBAL_RACE, u->address, o->launch, o->group, o->wave, a->inst, 0); break; }
  }
  memset(x->readers, 0, sizeof x->readers);
  x->w_id = c->id;
  x->w_clk = clk;
  x->w_inst = inst;
  x->w_scope = (u8)u->scope;
  x->w_atomic = (u8)u->sync;
}
void check_global(Wave *w, const Inst *i, u64 address, int bytes, int write, int atomic, int scope) {
  Machine *m = w->machine;
  if (!(m->detect & DETECT_GLOBAL)) return;
  u32 cached = w->launch->alloc_cache[i - w->launch->prog];
  Alloc *a = cached < m->num_allocs ? &m->allocs[cached] : 0;
  if (!a || address < a->base || address >= a->base + a->size) a = find_alloc(m, address);
  if (!a || a->read_only) return;
  int sync = atomic || (scope >= SCOPE_AGENT && bytes <= 8);
  if (!a->pages) a->pages = calloc((a->size + 1027) / 1024, sizeof *a->pages);
  Use u = {w, i, address, write, sync, scope};
  for (u64 at = address - a->base, end = at + (u64)bytes; at < end;) {
    u64 word = at >> 2;
    u32 part = 4 - (u32)(at & 3) < end - at ? 4 - (u32)(at & 3) : (u32)(end - at);
    ShadowPage **page = &a->pages[word >> 8];
    if (!*page) *page = calloc(1, sizeof **page);
    Cell *x = &(*page)->cells[word & 255], **sub = &(*page)->sub[word & 255];
    u.address = a->base + at;
    if (part == 4 && !*sub) {
      visit(&u, x);
    } else {
      if (!*sub) { *sub = malloc(4 * sizeof(Cell)); for (int k = 0; k < 4; k++) (*sub)[k] = *x; }
      for (u32 k = 0; k < part; k++) { u.address = a->base + at + k; visit(&u, &(*sub)[(at & 3) + k]); }
    }
    at += part;
  }
  if (!sync) return;
  for (int k = 0; k < bytes; k += 4) {
    if (atomic || !write) acquire(w, address + (u64)k);
    if (write) publish(w, address + (u64)k, scope, atomic);
  }
}
