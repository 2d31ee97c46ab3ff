/* The device: launches wait for their predecessors, workgroups for a compute unit, waves for their turn.
 *
 * One scheduler runs every resident wave of every rank, a slice at a time, in an order drawn from the seed. It stops
 * when all launches are done, when the budget is used up, on a fault, or when every wave waits for another. */
#include "valu.h"

extern const OpEntry scalar_ops[], valu_int_ops[], valu_float_ops[], valu_cmp_ops[], valu_half_ops[], valu_small_ops[], valu_scaled_ops[], modifier_ops[], mfma_ops[], vmem_ops[], buffer_ops[], atomic_ops[], ds_ops[];
static const OpEntry *const FAMILIES[] = {scalar_ops, valu_int_ops, valu_float_ops, valu_cmp_ops, valu_half_ops, valu_small_ops, valu_scaled_ops, modifier_ops, mfma_ops, vmem_ops, buffer_ops, atomic_ops, ds_ops, 0};

enum { DONE, BUDGET, QUIET, FAULTED };
enum { POLLS_TO_BE_QUIET = 64, UNITS_PER_CU = 32 };

u64 emu_handler(const char *name) {
  for (int f = 0; FAMILIES[f]; f++)
    for (const OpEntry *e = FAMILIES[f]; e->name; e++)
      if (!strcmp(e->name, name)) return (u64)(uintptr_t)e->fn;
  return 0;
}
u64 emu_unimplemented(void) { return (u64)(uintptr_t)op_unimplemented; }
u64 emu_modified(void) { return (u64)(uintptr_t)exec_modified; }
u32 emu_sizeof(u32 what) { return what == 0 ? sizeof(Inst) : what == 1 ? sizeof(Finding) : what == 2 ? sizeof(Fault) : sizeof(Traffic); }
u32 emu_num_ops(void) {
  u32 n = 0;
  for (int f = 0; FAMILIES[f]; f++) for (const OpEntry *e = FAMILIES[f]; e->name; e++) n++;
  return n;
}
const char *emu_op_name(u32 k) {
  for (int f = 0; FAMILIES[f]; f++) for (const OpEntry *e = FAMILIES[f]; e->name; e++) if (!k--) return e->name;
  return 0;
}

Machine *emu_new(u32 num_ranks, u32 num_cus, u32 num_xcds, u32 lds_per_cu, u32 max_groups, u32 detect, u32 seed, u32 quantum) {
  Machine *m = calloc(1, sizeof *m);
  m->num_ranks = num_ranks;
  m->num_cus = num_cus;
  m->num_xcds = num_xcds;
  m->lds_per_cu = lds_per_cu;
  m->max_groups = max_groups;
  m->detect = detect;
  m->rng = seed;
  m->quantum = quantum;
  m->cu_lds = calloc((size_t)num_ranks * num_cus, 4);
  m->cu_waves = calloc((size_t)num_ranks * num_cus, 4);
  return m;
}
void emu_schedule(Machine *m, u32 seed, u32 quantum) { m->rng = seed; m->quantum = quantum; }

int emu_alloc_add(Machine *m, u64 base, u64 size, i32 rank, u32 peer_visible, u32 read_only, u32 klass, u32 id) {
  u32 at = 0;
  while (at < m->num_allocs && m->allocs[at].base < base) at++;
  if ((at < m->num_allocs && m->allocs[at].base < base + size) || (at && m->allocs[at - 1].base + m->allocs[at - 1].size > base)) return 0;
  if (m->num_allocs == m->cap_allocs) {
    m->cap_allocs = m->cap_allocs ? 2 * m->cap_allocs : 64;
    m->allocs = realloc(m->allocs, m->cap_allocs * sizeof(Alloc));
  }
  memmove(&m->allocs[at + 1], &m->allocs[at], (m->num_allocs - at) * sizeof(Alloc));
  m->num_allocs++;
  Alloc *a = &m->allocs[at];
  memset(a, 0, sizeof *a);
  a->base = base; a->size = size; a->rank = rank; a->peer_visible = (u8)peer_visible; a->read_only = (u8)read_only; a->klass = (u8)klass; a->live = 1; a->id = id;
  return 1;
}
void free_shadow(Alloc *a);
int emu_alloc_remove(Machine *m, u64 base) {
  Alloc *a = find_alloc(m, base);
  if (!a || a->base != base) return 0;
  free_shadow(a);
  u32 at = (u32)(a - m->allocs);
  memmove(a, a + 1, (m->num_allocs - at - 1) * sizeof(Alloc));
  m->num_allocs--;
  return 1;
}

typedef struct {
  u64 prog, num_insts;
  u32 num_rows, lds_bytes, scratch_bytes, num_user_sgprs, rsrc2, properties, mode, preload, preload_offset, entry;
  i32 rank;
  u32 grid[3], block[3], num_deps, deps[8], kernarg_bytes;
  u64 kernarg;
} LaunchDesc;
u32 emu_launch(Machine *m, const LaunchDesc *d) {
  Launch *l = calloc(1, sizeof *l);
  l->prog = (Inst *)(uintptr_t)d->prog;
  l->num_insts = (u32)d->num_insts;
  l->num_rows = d->num_rows; l->lds_bytes = d->lds_bytes; l->scratch_bytes = d->scratch_bytes; l->num_user_sgprs = d->num_user_sgprs;
  l->rsrc2 = d->rsrc2; l->properties = d->properties; l->mode = d->mode; l->preload = d->preload; l->preload_offset = d->preload_offset;
  l->prologue = d->entry; l->rank = d->rank;
  memcpy(l->grid, d->grid, sizeof l->grid);
  memcpy(l->block, d->block, sizeof l->block);
  l->num_groups = d->grid[0] * d->grid[1] * d->grid[2];
  l->num_deps = d->num_deps;
  memcpy(l->deps, d->deps, sizeof l->deps);
  l->counts = calloc(l->num_insts, 8);
  l->alloc_cache = malloc(4 * l->num_insts);
  memset(l->alloc_cache, 0xff, 4 * l->num_insts);
  l->kernarg = aligned_alloc(64, (d->kernarg_bytes + 511) / 256 * 256); /* slack for loads that run past the last argument */
  memset(l->kernarg, 0, (d->kernarg_bytes + 511) / 256 * 256);
  memcpy(l->kernarg, (const void *)(uintptr_t)d->kernarg, d->kernarg_bytes);
  l->packet = aligned_alloc(64, 256);
  memset(l->packet, 0, 256);
  u16 head[6] = {2, (u16)(1 + (d->grid[1] * d->block[1] > 1) + (d->grid[2] * d->block[2] > 1)), (u16)d->block[0], (u16)d->block[1], (u16)d->block[2], 0};
  memcpy(l->packet, head, 12);
  u32 sizes[3] = {d->grid[0] * d->block[0], d->grid[1] * d->block[1], d->grid[2] * d->block[2]};
  memcpy(l->packet + 12, sizes, 12);
  if (m->num_launches == m->cap_launches) {
    m->cap_launches = m->cap_launches ? 2 * m->cap_launches : 64;
    m->launches = realloc(m->launches, m->cap_launches * sizeof *m->launches);
  }
  l->id = m->num_launches;
  m->launches[m->num_launches++] = l;
  emu_alloc_add(m, (u64)(uintptr_t)l->kernarg, (d->kernarg_bytes + 511) / 256 * 256, d->rank, 0, 1, NUM_CLASSES - 1, ~0u);
  emu_alloc_add(m, (u64)(uintptr_t)l->packet, 256, d->rank, 0, 1, NUM_CLASSES - 1, ~0u);
  m->change++;
  return l->id;
}
int emu_launch_done(Machine *m, u32 id) { return m->launches[id]->done; }
const u64 *emu_launch_counts(Machine *m, u32 id) { return m->launches[id]->counts; }
Traffic *emu_launch_traffic(Machine *m, u32 id) {
  Launch *l = m->launches[id];
  l->traffic.instructions = 0;
  for (u32 k = 0; k < l->num_insts; k++) l->traffic.instructions += l->counts[k];
  return &l->traffic;
}
static void drop_launch_memory(Machine *m, Launch *l) {
  emu_alloc_remove(m, (u64)(uintptr_t)l->kernarg);
  emu_alloc_remove(m, (u64)(uintptr_t)l->packet);
  free(l->kernarg); free(l->packet); free(l->alloc_cache);
  l->kernarg = l->packet = 0;
  l->alloc_cache = 0;
}

static u32 next_random(Machine *m) { m->rng ^= m->rng << 13; m->rng ^= m->rng >> 17; m->rng ^= m->rng << 5; return m->rng; }

static void start_wave(Machine *m, Group *g, u32 idx, u64 num_items) {
  Launch *l = g->launch;
  Wave *w = aligned_alloc(64, (sizeof *w + 63) / 64 * 64);
  memset(w, 0, sizeof *w);
  w->machine = m; w->launch = l; w->group = g; w->idx = idx;
  w->num_rows = l->num_rows;
  w->tmp_row = l->num_rows;
  w->v = aligned_alloc(64, (size_t)(l->num_rows + TMP_ROWS) * sizeof *w->v);
  for (u32 r = 0; r < l->num_rows + TMP_ROWS; r++) for (int k = 0; k < LANES; k++) w->v[r][k] = 0x7fc0dead;
  for (int k = 0; k < NUM_SGPRS; k++) w->s[k] = 0xdeadbeef;
  u64 e = 0;
  for (u32 k = 0; k < LANES; k++) {
    u32 t = idx * LANES + k;
    if (t >= num_items) continue;
    e |= (u64)1 << k;
    w->v[0][k] = t % l->block[0] | (t / l->block[0] % l->block[1]) << 10 | (t / l->block[0] / l->block[1]) << 20;
  }
  set_pair(&w->s[SG_EXEC], e);
  set_pair(&w->s[SG_VCC], 0);
  w->s[SG_M0] = 0;
  u32 p = 0;
  if (l->properties & 1) { memset(&w->s[p], 0, 16); p += 4; }
  if (l->properties & 2) { set_pair(&w->s[p], (u64)(uintptr_t)l->packet); p += 2; }
  if (l->properties & 4) { set_pair(&w->s[p], (u64)(uintptr_t)l->packet + 128); p += 2; }
  if (l->properties & 8) { set_pair(&w->s[p], (u64)(uintptr_t)l->kernarg); p += 2; }
  if (l->properties & 16) { set_pair(&w->s[p], l->id); p += 2; }
  if (l->properties & 32) { set_pair(&w->s[p], 0); p += 2; }
  if (l->properties & 64) w->s[p++] = l->scratch_bytes;
  for (u32 k = 0; k < l->preload; k++) memcpy(&w->s[p + k], l->kernarg + 4 * (l->preload_offset + k), 4);
  p = l->num_user_sgprs;
  for (int k = 0; k < 3; k++) if (l->rsrc2 >> (7 + k) & 1) w->s[p++] = g->id[k];
  w->mode = l->mode;
  w->pc = l->prologue;
  if (l->scratch_bytes) w->scratch = calloc(LANES, l->scratch_bytes);
  w->mask_exec = ~e;
  lanes_of(w);
  g->waves[idx] = w;
  if (m->num_ready == m->cap_ready) {
    m->cap_ready = m->cap_ready ? 2 * m->cap_ready : 256;
    m->ready = realloc(m->ready, m->cap_ready * sizeof *m->ready);
  }
  m->ready[m->num_ready++] = w;
  if (m->detect) check_wave_start(w);
}

static u32 wave_units(const Launch *l) { /* share of a compute unit that one wave takes: registers limit the waves of a SIMD */
  u32 per_simd = l->num_rows ? 512 / l->num_rows : 8;
  if (per_simd > 8) per_simd = 8;
  if (per_simd < 1) per_simd = 1;
  return (8 + per_simd - 1) / per_simd;
}
static int start_group(Machine *m, Launch *l) {
  u64 items = (u64)l->block[0] * l->block[1] * l->block[2];
  u32 flat = l->next_group, xcd = flat % m->num_xcds, per_xcd = m->num_cus / m->num_xcds, waves = (u32)((items + LANES - 1) / LANES), need = waves * wave_units(l), best = ~0u;
  if (m->max_groups && l->live_groups >= m->max_groups) return 0;
  for (u32 k = 0; k < per_xcd; k++) {
    u32 cu = (u32)l->rank * m->num_cus + xcd * per_xcd + (k + flat / m->num_xcds) % per_xcd;
    if (m->cu_lds[cu] + l->lds_bytes <= m->lds_per_cu && m->cu_waves[cu] + need <= UNITS_PER_CU) { best = cu; break; }
  }
  if (best == ~0u) return 0;
  m->cu_lds[best] += l->lds_bytes;
  m->cu_waves[best] += need;
  Group *g = calloc(1, sizeof *g);
  g->launch = l;
  g->flat_id = flat;
  g->id[0] = flat % l->grid[0]; g->id[1] = flat / l->grid[0] % l->grid[1]; g->id[2] = flat / l->grid[0] / l->grid[1];
  g->cu = best; g->xcd = xcd;
  g->num_waves = g->alive = waves;
  g->lds_bytes = l->lds_bytes;
  g->lds = malloc(l->lds_bytes + 64);
  for (u32 k = 0; k < l->lds_bytes + 64; k++) g->lds[k] = (u8)(0x7fc0dead >> 8 * (k & 3));
  g->waves = calloc(waves, sizeof *g->waves);
  if (m->detect) check_group_start(g);
  for (u32 k = 0; k < waves; k++) start_wave(m, g, k, items);
  l->next_group++;
  l->live_groups++;
  m->change++;
  return 1;
}
static int dispatch(Machine *m) {
  int open = 0, again = 0;
  while (m->first_open < m->num_launches && m->launches[m->first_open]->done) m->first_open++;
  for (u32 k = m->first_open; k < m->num_launches; k++) {
    Launch *l = m->launches[k];
    if (l->done) continue;
    int ready = 1;
    for (u32 d = 0; d < l->num_deps; d++) ready &= m->launches[l->deps[d]]->done != 0;
    open = 1;
    if (!ready) continue;
    if (!l->started) { l->started = 1; if (m->detect) check_launch_start(m, l); }
    while (l->next_group < l->num_groups && start_group(m, l)) {}
    if (l->next_group == l->num_groups && !l->live_groups) {
      if (m->detect) check_launch_end(m, l);
      l->done = 1;
      drop_launch_memory(m, l);
      m->change++;
      again = 1;
    }
  }
  if (again) return dispatch(m); /* successors may start now */
  return open;
}
static void end_group(Machine *m, Group *g) {
  Launch *l = g->launch;
  m->cu_lds[g->cu] -= l->lds_bytes;
  m->cu_waves[g->cu] -= g->num_waves * wave_units(l);
  if (m->detect) check_group_end(g);
  l->live_groups--;
  free(g->lds); free(g->waves); free(g);
}
static void end_wave(Machine *m, u32 slot) {
  Wave *w = m->ready[slot];
  Group *g = w->group;
  if (w->chk) check_wave_end(w);
  g->waves[w->idx] = 0;
  g->alive--;
  m->change++;
  m->clock += w->executed;
  free(w->v); free(w->scratch); free(w);
  m->ready[slot] = m->ready[--m->num_ready];
  if (!g->alive) { end_group(m, g); m->ndispatch = 1; }
}
static void release_barrier(Machine *m, Group *g) {
  if (!g->alive || g->waiting < g->alive) return;
  g->waiting = 0;
  g->epoch++;
  m->change++;
  if (m->detect) check_barrier(g);
  for (u32 k = 0; k < g->num_waves; k++) if (g->waves[k] && g->waves[k]->state == ST_BARRIER) g->waves[k]->state = ST_RUN;
}
static void run_slice(Wave *w, u64 slice) {
  Launch *l = w->launch;
  const Inst *prog = l->prog;
  u64 *counts = l->counts, n = 0;
  unsigned old = denormals_set((w->mode >> 4 & 3) != 3);
  w->state = ST_RUN;
  while (n < slice) {
    if (w->pc >= l->num_insts) { w->pc = l->num_insts; fault(w, prog, FAULT_MEMORY, w->pc, -1, "the program ran past its last instruction"); break; }
    u64 pc = w->pc++;
    const Inst *i = &prog[pc];
    counts[pc]++;
    n++;
    if (w->indexed && i->is_vector) exec_indexed(w, i);
    else {
      if (w->chk) check_registers(w, i);
      CALL(i, w);
    }
    if (w->state != ST_RUN) break;
  }
  denormals_back(old);
  w->executed += n;
}
static int blocked(const Machine *m, const Wave *w) { return w->state == ST_BARRIER || (w->sleeping && w->parked_change == m->change); }
static int all_quiet(const Machine *m) {
  for (u32 k = 0; k < m->num_ready; k++) {
    const Wave *w = m->ready[k];
    if (w->state == ST_BARRIER) continue;
    if (w->poll_change != m->change || w->polls < POLLS_TO_BE_QUIET) return 0;
  }
  return 1;
}
/* Run up to `budget` wave instructions. */
u32 emu_step(Machine *m, u64 budget, u64 *used) {
  u64 total = 0, idle = 0;
  u32 status = BUDGET;
  m->ndispatch = 1;
  while (total < budget) {
    if (m->ndispatch) {
      m->ndispatch = 0;
      int open = dispatch(m);
      if (!m->num_ready) { status = open ? QUIET : DONE; if (!open && m->detect) check_quiet(m); break; }
    }
    u32 slot = m->rng ? next_random(m) % m->num_ready : m->next_pick++ % m->num_ready, tries = 0;
    while (tries < m->num_ready && blocked(m, m->ready[slot])) { slot = slot + 1 == m->num_ready ? 0 : slot + 1; tries++; }
    if (tries == m->num_ready) { /* only sleepers and waves at barriers: let every sleeper look again */
      int sleepers = 0;
      for (u32 k = 0; k < m->num_ready; k++) if (m->ready[k]->sleeping) { m->ready[k]->sleeping = 0; sleepers = 1; }
      if (!sleepers) { status = QUIET; break; }
      if (all_quiet(m)) { status = QUIET; for (u32 k = 0; k < m->num_ready; k++) m->ready[k]->polls = 0; break; }
      continue;
    }
    Wave *w = m->ready[slot];
    u64 slice = m->rng ? 1 + next_random(m) % m->quantum : m->quantum, before = w->executed, change = m->change;
    w->sleeping = 0;
    run_slice(w, slice);
    total += w->executed - before;
    Group *g = w->group;
    if (w->state == ST_FAULT) { status = FAULTED; break; }
    if (w->state == ST_BARRIER) { g->waiting++; release_barrier(m, g); }
    if (w->state == ST_END) {
      int last = g->alive == 1;
      end_wave(m, slot);
      if (!last) release_barrier(m, g);
      if (!m->num_ready) m->ndispatch = 1;
    }
    if (m->change != change) idle = 0;
    else if (++idle > 4 * (u64)m->num_ready + 64) { /* waves that spin without sleeping */
      idle = 0;
      if (all_quiet(m)) { status = QUIET; for (u32 k = 0; k < m->num_ready; k++) m->ready[k]->polls = 0; break; }
    }
  }
  *used = total;
  return status;
}

const Fault *emu_fault(Machine *m) { return &m->fault; }
u32 emu_findings(Machine *m, const Finding **out) { *out = m->findings; return m->num_findings; }
void emu_clear_findings(Machine *m) { m->num_findings = 0; m->num_findings_total = 0; }
/* Waves that wait: launch, workgroup, wave, state, instruction, polled address, value seen there. */
u32 emu_waiting(Machine *m, u64 *out, u32 max) {
  u32 n = 0;
  for (u32 k = 0; k < m->num_ready && n < max; k++, n++) {
    Wave *w = m->ready[k];
    u64 row[8] = {w->launch->id, w->group->flat_id, w->idx, w->state, w->state == ST_BARRIER ? w->pc - 1 : w->poll_pc, w->poll_addr, w->poll_value, w->group->alive};
    memcpy(out + 8 * n, row, sizeof row);
  }
  return m->num_ready;
}
void emu_wave_registers(Machine *m, u32 k, u32 *scalar, u32 *vector) {
  Wave *w = m->ready[k];
  memcpy(scalar, w->s, 4 * NUM_SGPRS);
  memcpy(vector, w->v, (size_t)w->num_rows * sizeof *w->v);
}
/* Drop everything in flight: after a fault or a deadlock the device goes on empty. */
void emu_reset(Machine *m) {
  while (m->num_ready) { m->ready[0]->state = ST_END; Group *g = m->ready[0]->group; g->waiting = 0; end_wave(m, 0); }
  for (u32 k = m->first_open; k < m->num_launches; k++) if (!m->launches[k]->done) { drop_launch_memory(m, m->launches[k]); m->launches[k]->done = 1; }
  m->first_open = m->num_launches;
  memset(&m->fault, 0, sizeof m->fault);
  if (m->detect) check_quiet(m);
}
void emu_drop_launch(Machine *m, u32 id) { free(m->launches[id]->counts); m->launches[id]->counts = 0; }
void check_free(Machine *m);
void emu_free(Machine *m) {
  emu_reset(m);
  if (m->detect) check_free(m);
  for (u32 k = 0; k < m->num_launches; k++) { free(m->launches[k]->counts); free(m->launches[k]); }
  while (m->num_allocs) emu_alloc_remove(m, m->allocs[0].base);
  free(m->allocs); free(m->launches); free(m->ready); free(m->cu_lds); free(m->cu_waves); free(m);
}
