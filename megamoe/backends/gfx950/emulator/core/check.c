/* Waits and LDS: what is outstanding per wave, registers used too early, LDS accesses not ordered by barrier and wait. */
#include "check.h"

static void record(Wave *w, const Inst *i, u32 kind, u64 address, u32 o_launch, u32 o_group, u32 o_wave, u32 o_inst, u32 o_write) {
  Machine *m = w->machine;
  u32 inst = (u32)(i - w->launch->prog);
  m->num_findings_total++;
  for (u32 k = 0; k < m->num_findings; k++) {
    Finding *f = &m->findings[k];
    if (f->kind == kind && f->inst == inst && f->o_inst == o_inst && m->launches[f->launch]->prog == w->launch->prog && f->o_write == o_write) { f->extra++; return; }
  }
  if (m->num_findings == MAX_FINDINGS) return;
  Finding *f = &m->findings[m->num_findings++];
  *f = (Finding){kind, w->launch->id, w->group->flat_id, w->idx, inst, o_launch, o_group, o_wave, o_inst, o_write, address, 1};
}

void add_finding(Wave *w, const Inst *i, u32 kind, u64 address, u32 o_launch, u32 o_group, u32 o_wave, u32 o_inst, u32 o_write) {
  pthread_mutex_lock(&w->machine->report_lock);
  record(w, i, kind, address, o_launch, o_group, o_wave, o_inst, o_write);
  pthread_mutex_unlock(&w->machine->report_lock);
}

/* Registers. */
static inline u64 bits_in_word(u32 first, u32 count, u32 word) { /* of bits first .. first + count - 1, those in a word */
  u32 low = first > 64 * word ? first - 64 * word : 0, high = first + count - 64 * word;
  return (high >= 64 ? ~(u64)0 : ((u64)1 << high) - 1) & ~(u64)0 << low;
}
static inline int any_bit(const u64 *bits, u32 first, u32 count, u32 *which) {
  for (u32 word = first >> 6; word <= (first + count - 1) >> 6; word++) {
    u64 hit = bits[word] & bits_in_word(first, count, word);
    if (hit) { *which = 64 * word + (u32)__builtin_ctzll(hit); return 1; }
  }
  return 0;
}
/* Whether everything outstanding for registers that `i` loads comes before what it loads. */
static int in_order(const Wave *w, const WaveCheck *c, const Inst *i, const Range *r) {
  for (u32 x = r->first; i->in_order && x < (u32)r->first + r->count; x++)
    if (c->wait_bits[x >> 6] >> (x & 63) & 1 && w->launch->prog[c->wait_inst[x]].in_order != i->in_order) return 0;
  return i->in_order;
}
/* `ranges` has the registers of `i`, moved where register indexing is on. */
void check_moved(Wave *w, const Inst *i, const Inst *ranges) {
  WaveCheck *c = w->chk;
  if (!c->num_wait_bits) return;
  for (int k = 0; k < ranges->nreads + ranges->nwrites; k++) {
    const Range *r = k < ranges->nreads ? &ranges->reads[k] : &ranges->writes[k - ranges->nreads];
    u32 which;
    if (!any_bit(c->wait_bits, r->first, r->count, &which)) continue;
    if (k >= ranges->nreads && in_order(w, c, i, r)) { c->overlaid = 1; continue; }
    if (w->machine->detect & DETECT_WAITS) add_finding(w, i, FOUND_REGISTER, which, w->launch->id, w->group->flat_id, w->idx, c->wait_inst[which], 0);
    c->wait_bits[which >> 6] &= ~((u64)1 << (which & 63)); /* once */
  }
}
void check_registers(Wave *w, const Inst *i) { check_moved(w, i, i); }
static void clear_bits(WaveCheck *c, const Pending *p) {
  if (c->overlaid) { /* a later load may have taken a register over */
    for (int k = 0; k < p->num_writes; k++)
      for (u32 r = p->first[k]; r < (u32)p->first[k] + p->count[k]; r++)
        if (c->wait_inst[r] == p->inst) c->wait_bits[r >> 6] &= ~((u64)1 << (r & 63));
    c->num_wait_bits--;
    return;
  }
  for (int k = 0; k < p->num_writes; k++)
    for (u32 word = p->first[k] >> 6u, last = ((u32)p->first[k] + p->count[k] - 1) >> 6; word <= last; word++)
      c->wait_bits[word] &= ~bits_in_word(p->first[k], p->count[k], word);
  c->num_wait_bits--;
}
static void complete(Wave *w, int queue) {
  WaveCheck *c = w->chk;
  Pending *p = &c->queue[queue][c->head[queue]];
  c->head[queue] = (c->head[queue] + 1) % MAX_PENDING;
  c->size[queue]--;
  clear_bits(c, p);
  if (queue == 0) c->dma_done = p->seq;
  if (queue == 0) race_complete(w, p);
  snapshot_drop(p->acquired);
}
void check_issue(Wave *w, const Inst *i, int counters, int is_store) {
  WaveCheck *c = w->chk;
  (void)is_store;
  int queue = counters & CNT_VM ? 0 : 1;
  if (c->size[queue] == MAX_PENDING - 1) complete(w, queue); /* the counter saturates: the hardware waits */
  Pending *p = &c->queue[queue][(c->head[queue] + c->size[queue]++) % MAX_PENDING];
  p->counters = (u32)counters;
  p->seq = p->lds_time = 0;
  p->acquired = 0;
  p->num_writes = i->nwrites;
  p->inst = (u32)(i - w->launch->prog);
  p->fence_scope = i->scope;
  if (queue == 0) {
    p->seq = ++c->seq;
    p->acquired = c->pending_load;
    c->pending_load = 0;
    if (counters & CNT_FENCE_REL) memcpy(p->performed_at_issue, c->level[LV_PERFORMED], sizeof p->performed_at_issue);
  }
  if (counters & (CNT_LGKM | CNT_SMEM)) p->lds_time = ++w->group->chk->clock;
  for (int k = 0; k < i->nwrites; k++) {
    p->first[k] = i->writes[k].first;
    p->count[k] = i->writes[k].count;
    for (u32 word = p->first[k] >> 6u, last = ((u32)p->first[k] + p->count[k] - 1) >> 6; word <= last; word++)
      c->wait_bits[word] |= bits_in_word(p->first[k], p->count[k], word);
    for (u32 r = p->first[k]; r < (u32)p->first[k] + p->count[k]; r++) c->wait_inst[r] = p->inst;
  }
  c->num_wait_bits++;
}
/* vmcnt is bits 3:0 and 15:14, lgkmcnt bits 11:8. Scalar loads return in any order: only lgkmcnt(0) waits for one. */
void check_wait(Wave *w, u32 simm) {
  WaveCheck *c = w->chk;
  u32 vm = (simm & 15) | (simm >> 10 & 0x30), lgkm = simm >> 8 & 15;
  while (c->size[0] > vm) complete(w, 0);
  if (lgkm == 15) return;
  if (lgkm) {
    for (u32 k = 0; k < c->size[1]; k++) if (c->queue[1][(c->head[1] + k) % MAX_PENDING].counters & CNT_SMEM) return;
  }
  while (c->size[1] > lgkm) complete(w, 1);
}

/* Time on the LDS clock up to which every LDS operation of a wave has been waited for. */
u32 lds_done(const Wave *w) {
  const WaveCheck *c = w->chk;
  u32 done = w->group->chk->clock;
  for (int q = 0; q < 2; q++)
    for (u32 k = 0; k < c->size[q]; k++) {
      u32 t = c->queue[q][(c->head[q] + k) % MAX_PENDING].lds_time;
      if (t && t - 1 < done) done = t - 1;
    }
  return done;
}

/* LDS. Time is the workgroup's count of LDS operations; `known` is what every wave had waited for at the last barrier. */
void check_group_start(Group *g) {
  g->chk = calloc(1, sizeof *g->chk);
  g->chk->num_lines = g->lds_bytes / LINE_BYTES + 2;
  g->chk->lines = calloc(g->chk->num_lines, sizeof(Line));
}
void check_group_end(Group *g) {
  if (!g->chk) return;
  for (u32 k = 0; k < g->chk->num_lines; k++) free(g->chk->lines[k].more);
  free(g->chk->lines); free(g->chk);
  g->chk = 0;
}
struct Use { Wave *w; const Inst *i; u64 address; int write, dma; };
static int ordered_write(const struct LdsCheck *g, const LdsCell *x) { return x->w_time <= g->known[x->w_flags & 1][x->w_wave]; }
static void visit_lds(const Use *u, Segment *s) {
  Wave *w = u->w;
  LdsCell *x = &s->lds;
  struct LdsCheck *g = w->group->chk;
  Group *gr = w->group;
  u32 self = w->idx % MAX_MATES, on = w->machine->detect & DETECT_LDS, unordered = 0;
  u64 address = u->address + (u64)__builtin_ctzll(s->mask);
  if (x->w_time && ordered_write(g, x)) x->w_time = x->w_inst = x->w_wave = x->w_flags = 0; /* nobody can race with it any more */
  if (x->w_time && !(u->write == 2 && x->w_flags & 2)) {
    if (x->w_wave != self) {
      if (on) add_finding(w, u->i, FOUND_LDS_RACE, address, gr->launch->id, gr->flat_id, x->w_wave, x->w_inst, 1);
    } else if (x->w_flags & 1 && x->w_time > w->chk->dma_done && !u->dma && w->machine->detect & DETECT_WAITS) {
      add_finding(w, u->i, FOUND_LDS_WAIT, address, gr->launch->id, gr->flat_id, x->w_wave, x->w_inst, 1);
    }
  }
  for (u32 left = x->readers & ~(1u << self); left; left &= left - 1) if (x->r_time > g->known[0][__builtin_ctz(left)]) unordered |= left & -left;
  if (u->write && unordered && on)
    add_finding(w, u->i, FOUND_LDS_RACE, address, gr->launch->id, gr->flat_id, (u32)__builtin_ctz(unordered), x->r_inst, 0);
  if (u->write) {
    x->w_time = u->dma ? w->chk->seq + 1 : g->clock + 1; /* check_issue counts this operation afterwards */
    x->w_inst = (u32)(u->i - w->launch->prog);
    x->w_wave = (u8)self;
    x->w_flags = (u8)(u->dma ? 1 : u->write == 2 ? 2 : 0);
    x->readers = 0;
    x->r_time = x->r_inst = 0;
  } else {
    x->readers = (u16)((unordered ? x->readers : 0) | 1u << self);
    x->r_time = g->clock + 1;
    x->r_inst = (u32)(u->i - w->launch->prog);
  }
}
void check_lds(Wave *w, const Inst *i, const u32 *address, u64 exec, int bytes, int write, int dma) {
  struct LdsCheck *g = w->group->chk;
  Touched list[MAX_TOUCHED];
  u32 n = 0;
  u64 mask = bytes_mask(bytes);
  for (; exec; exec &= exec - 1) {
    u32 at = address[__builtin_ctzll(exec)], in = at % LINE_BYTES;
    Line *x = &g->lines[at / LINE_BYTES];
    if (!x->count) line_reset(x, 0);
    line_touch(x, at - in, mask << in, list, &n);
    if (in + (u32)bytes <= LINE_BYTES) continue;
    if (!x[1].count) line_reset(&x[1], 0);
    line_touch(&x[1], at - in + LINE_BYTES, mask >> (LINE_BYTES - in), list, &n);
  }
  Use u = {w, i, 0, write, dma};
  for (u32 k = 0; k < n; k++) { u.address = list[k].address; line_visit(&u, list[k].line, visit_lds); }
}
