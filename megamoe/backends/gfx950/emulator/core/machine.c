/* The device as the host sees it: allocations, launches, findings, what waits. */
#include "machine.h"

Machine *emu_new(u32 num_ranks, u32 num_cus, u32 num_xcds, u32 lds_per_cu, u32 max_groups, u32 detect, u32 seed, u32 quantum, u32 num_workers) {
  Machine *m = calloc(1, sizeof *m);
  m->num_ranks = num_ranks;
  m->num_cus = num_cus;
  m->num_xcds = num_xcds;
  m->lds_per_cu = lds_per_cu;
  m->max_groups = max_groups;
  m->detect = detect;
  m->num_workers = num_workers;
  m->shared = num_workers > 1;
  m->units = calloc((size_t)num_ranks * num_cus, sizeof *m->units);
  m->workers = aligned_alloc(64, num_workers * sizeof *m->workers);
  memset(m->workers, 0, num_workers * sizeof *m->workers);
  for (u32 k = 0; k < num_workers; k++) { m->workers[k].machine = m; m->workers[k].index = k; }
  pthread_mutex_init(&m->race_lock, 0);
  pthread_mutex_init(&m->report_lock, 0);
  emu_schedule(m, seed, quantum);
  if (detect) check_begin(m);
  return m;
}
/* Worker 0 draws from the seed itself, so that one worker gives the same run for the same seed. */
void emu_schedule(Machine *m, u32 seed, u32 quantum) {
  for (u32 k = 0; k < m->num_workers; k++) m->workers[k].rng = seed ? (seed ^ k * 0x9e3779b9u ? seed ^ k * 0x9e3779b9u : 1) : 0;
  m->quantum = quantum;
}

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
  u32 grid[3], block[3], num_deps, deps[32], kernarg_bytes;
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
  l->traffic = calloc(1, sizeof *l->traffic);
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
  return l->id;
}
int emu_launch_done(Machine *m, u32 id) { return m->launches[id]->done; }
const u64 *emu_launch_counts(Machine *m, u32 id) { return m->launches[id]->counts; }
Traffic *emu_launch_traffic(Machine *m, u32 id) {
  Launch *l = m->launches[id];
  l->traffic->instructions = 0;
  for (u32 k = 0; k < l->num_insts; k++) l->traffic->instructions += l->counts[k];
  return l->traffic;
}
static void drop_counters(Launch *l) { free(l->counts); free(l->traffic); l->counts = 0; l->traffic = 0; }
void launch_drop_memory(Machine *m, Launch *l) {
  if (!l->kernarg) return;
  if (l->unwanted) drop_counters(l);
  emu_alloc_remove(m, (u64)(uintptr_t)l->kernarg);
  emu_alloc_remove(m, (u64)(uintptr_t)l->packet);
  free(l->kernarg); free(l->packet); free(l->alloc_cache);
  l->kernarg = l->packet = 0;
  l->alloc_cache = 0;
}

const Fault *emu_fault(Machine *m) { return &m->fault; }
u32 emu_findings(Machine *m, const Finding **out) { *out = m->findings; return m->num_findings; }
void emu_clear_findings(Machine *m) { m->num_findings = 0; m->num_findings_total = 0; }
/* Waves that wait: launch, workgroup, wave, state, instruction, polled address, value seen there. */
u32 emu_waiting(Machine *m, u64 *out, u32 max) {
  u32 n = 0;
  for (u32 q = 0; q < m->num_workers; q++)
    for (u32 k = 0; k < m->workers[q].num_ready; k++, n++) {
      Wave *w = m->workers[q].ready[k];
      u64 row[8] = {w->launch->id, w->group->flat_id, w->idx, w->state, w->state == ST_BARRIER ? w->pc - 1 : w->poll_pc, w->poll_addr, w->poll_value, w->group->alive};
      if (n < max) memcpy(out + 8 * n, row, sizeof row);
    }
  return n;
}
/* Drop everything in flight: after a fault or a deadlock the device goes on empty. */
void emu_reset(Machine *m) {
  for (u32 q = 0; q < m->num_workers; q++)
    while (m->workers[q].num_ready) end_wave(&m->workers[q], 0);
  for (u32 k = m->first_open; k < m->num_launches; k++) { launch_drop_memory(m, m->launches[k]); m->launches[k]->done = 1; }
  m->first_open = m->num_launches;
  memset(&m->fault, 0, sizeof m->fault);
  if (m->detect) check_quiet(m);
}
/* Nobody will read the counters of a launch any more. */
void emu_drop_launch(Machine *m, u32 id) {
  m->launches[id]->unwanted = 1;
  if (m->launches[id]->done) drop_counters(m->launches[id]);
}
void emu_free(Machine *m) {
  emu_reset(m);
  if (m->detect) check_free(m);
  for (u32 k = 0; k < m->num_launches; k++) { drop_counters(m->launches[k]); free(m->launches[k]); }
  while (m->num_allocs) emu_alloc_remove(m, m->allocs[0].base);
  for (u32 k = 0; k < m->num_workers; k++) free(m->workers[k].ready);
  pthread_mutex_destroy(&m->race_lock);
  pthread_mutex_destroy(&m->report_lock);
  free(m->allocs); free(m->launches); free(m->workers); free(m->units); free(m);
}
