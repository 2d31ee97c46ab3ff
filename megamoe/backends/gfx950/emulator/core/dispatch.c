/* Launches wait for their predecessors, workgroups for room on a compute unit of their die. */
#include "machine.h"

enum { SIMDS = 4, SHARES = 840 /* divisible by 1 to 8 */, LDS_GRANULE = 1280 };

static void start_wave(Worker *q, Group *g, u32 idx, u64 num_items) {
  Machine *m = q->machine;
  Launch *l = g->launch;
  Wave *w = aligned_alloc(64, (sizeof *w + 63) / 64 * 64);
  memset(w, 0, sizeof *w);
  w->machine = m; w->worker = q; w->launch = l; w->group = g; w->idx = idx;
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
  if (q->num_ready == q->cap_ready) {
    q->cap_ready = q->cap_ready ? 2 * q->cap_ready : 256;
    q->ready = realloc(q->ready, q->cap_ready * sizeof *q->ready);
  }
  q->ready[q->num_ready++] = w;
  if (m->detect) check_wave_start(w);
}

/* Share of a SIMD that one wave takes: 512 registers, at most eight waves. */
static u32 wave_share(const Launch *l) {
  u32 fit = l->num_rows ? 512 / l->num_rows : 8;
  return SHARES / (fit > 8 ? 8 : fit < 1 ? 1 : fit);
}
/* Round robin over the dies, then over a die's compute units; limits of a unit: LDS, and wave slots by registers. */
static int start_group(Worker *q, Launch *l) {
  Machine *m = q->machine;
  u64 items = (u64)l->block[0] * l->block[1] * l->block[2];
  u32 flat = l->next_group, xcd = flat % m->num_xcds, per_xcd = m->num_cus / m->num_xcds, waves = (u32)((items + LANES - 1) / LANES), need = waves * wave_share(l);
  u32 lds = (l->lds_bytes + LDS_GRANULE - 1) / LDS_GRANULE * LDS_GRANULE, cu = 0;
  Unit *unit = 0;
  if (m->max_groups && l->live_groups >= m->max_groups) return 0;
  for (u32 k = 0; k < per_xcd && !unit; k++) {
    cu = xcd * per_xcd + (k + flat / m->num_xcds) % per_xcd;
    Unit *u = &m->units[(u32)l->rank * m->num_cus + cu];
    if (u->lds + lds <= m->lds_per_cu && u->waves + need <= SIMDS * SHARES) unit = u;
  }
  if (!unit) return 0;
  unit->lds += lds;
  unit->waves += need;
  Group *g = calloc(1, sizeof *g);
  g->launch = l;
  g->flat_id = flat;
  g->id[0] = flat % l->grid[0]; g->id[1] = flat / l->grid[0] % l->grid[1]; g->id[2] = flat / l->grid[0] / l->grid[1];
  g->cu = cu; g->xcd = xcd;
  g->num_waves = g->alive = waves;
  g->lds_bytes = l->lds_bytes;
  g->lds = malloc(l->lds_bytes + 64);
  for (u32 k = 0; k < l->lds_bytes + 64; k++) g->lds[k] = (u8)(0x7fc0dead >> 8 * (k & 3));
  g->waves = calloc(waves, sizeof *g->waves);
  if (m->detect) { check_group_start(g); check_reserve_ids(m, g); }
  for (u32 k = 0; k < waves; k++) start_wave(q, g, k, items);
  l->next_group++;
  l->live_groups++;
  made_progress(q);
  return 1;
}
static void end_group(Machine *m, Group *g) {
  Launch *l = g->launch;
  Unit *unit = &m->units[(u32)l->rank * m->num_cus + g->cu];
  unit->lds -= (l->lds_bytes + LDS_GRANULE - 1) / LDS_GRANULE * LDS_GRANULE;
  unit->waves -= g->num_waves * wave_share(l);
  if (m->detect) check_group_end(g);
  l->live_groups--;
  free(g->lds); free(g->waves); free(g);
}
void end_wave(Worker *q, u32 slot) {
  Wave *w = q->ready[slot];
  Group *g = w->group;
  if (w->chk) check_wave_end(w);
  g->waves[w->idx] = 0;
  g->alive--;
  made_progress(q);
  q->clock += w->executed;
  free(w->v); free(w->scratch); free(w);
  q->ready[slot] = q->ready[--q->num_ready];
  if (!g->alive) { end_group(q->machine, g); q->look = 1; }
}
void release_barrier(Worker *q, Group *g) {
  if (!g->alive || g->waiting < g->alive) return;
  g->waiting = 0;
  g->epoch++;
  made_progress(q);
  if (q->machine->detect) check_barrier(g);
  for (u32 k = 0; k < g->num_waves; k++) if (g->waves[k] && g->waves[k]->state == ST_BARRIER) g->waves[k]->state = ST_RUN;
}
/* Start what may start of this worker's launches; whether any launch of any rank is still open. */
int dispatch(Worker *q) {
  Machine *m = q->machine;
  int open = 0, again = 1;
  while (again) { /* successors may start when a launch ends */
    again = open = 0;
    q->seen_ends = __atomic_load_n(&m->ends, __ATOMIC_ACQUIRE);
    for (u32 k = m->first_open; k < m->num_launches; k++) {
      Launch *l = m->launches[k];
      if (__atomic_load_n(&l->done, __ATOMIC_ACQUIRE)) continue;
      open = 1;
      if (worker_of(m, l->rank) != q->index) continue;
      int ready = 1;
      for (u32 d = 0; d < l->num_deps; d++) ready &= __atomic_load_n(&m->launches[l->deps[d]]->done, __ATOMIC_ACQUIRE) != 0;
      if (!ready) continue;
      if (!l->started) { l->started = 1; if (m->detect) check_launch_start(m, l); }
      while (l->next_group < l->num_groups && start_group(q, l)) {}
      if (l->next_group < l->num_groups || l->live_groups) continue;
      if (m->detect) check_launch_end(m, l);
      __atomic_store_n(&l->done, 1, __ATOMIC_RELEASE);
      __atomic_add_fetch(&m->ends, 1, __ATOMIC_ACQ_REL);
      made_progress(q);
      again = 1;
    }
  }
  return open;
}
