/* Waves take turns. A worker runs the waves of its ranks, a slice at a time, in an order drawn from the seed; one worker
 * runs all ranks and repeats itself exactly, several run in threads. Workers stop when all launches are done, when the
 * budget is used up, on a fault, or when every wave of every worker waits for another. */
#include <sched.h>
#include <time.h>

#include "machine.h"
#include "valu.h"

enum { DONE, BUDGET, QUIET, FAULTED, NO_THREAD, RUNNING };
enum { POLLS_TO_BE_QUIET = 64 };

static u32 next_random(Worker *q) { q->rng ^= q->rng << 13; q->rng ^= q->rng >> 17; q->rng ^= q->rng << 5; return q->rng; }
/* Progress is counted by each worker and added up by whoever wants to know. */
void made_progress(Worker *q) { __atomic_store_n(&q->change, q->change + 1, __ATOMIC_RELEASE); q->view++; }
static u64 all_changes(const Machine *m) {
  u64 sum = 0;
  for (u32 k = 0; k < m->num_workers; k++) sum += __atomic_load_n(&m->workers[k].change, __ATOMIC_ACQUIRE);
  return sum;
}
static void stop(Machine *m, u32 why) {
  u32 none = RUNNING;
  __atomic_compare_exchange_n(&m->status, &none, why, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}
static int stopped(const Machine *m) { return __atomic_load_n(&m->status, __ATOMIC_ACQUIRE) != RUNNING; }
static void run_slice(Wave *w, u64 slice) {
  Launch *l = w->launch;
  const Inst *prog = l->prog;
  u64 *counts = l->counts, end = w->executed + slice;
  unsigned old = denormals_set((w->mode >> 4 & 3) != 3);
  w->state = ST_RUN;
  while (w->executed < end) {
    if (w->pc >= l->num_insts) { w->pc = l->num_insts; fault(w, prog, FAULT_MEMORY, w->pc, -1, "the program ran past its last instruction"); break; }
    u64 pc = w->pc++;
    const Inst *i = &prog[pc];
    counts[pc]++;
    w->executed++;
    if (w->indexed && i->is_vector) exec_indexed(w, i);
    else {
      if (w->chk) check_registers(w, i);
      CALL(i, w);
    }
    if (w->state != ST_RUN) break;
  }
  denormals_back(old);
}
static int blocked(const Worker *q, const Wave *w) { return w->state == ST_BARRIER || (w->sleeping && w->parked_change == q->view); }
static int all_quiet(const Worker *q) {
  for (u32 k = 0; k < q->num_ready; k++) {
    const Wave *w = q->ready[k];
    if (w->state == ST_BARRIER) continue;
    if (w->poll_change != q->view || w->polls < POLLS_TO_BE_QUIET) return 0;
  }
  return 1;
}
/* This worker has nothing to do until something changes. When that holds for all, the machine is quiet or done. */
static void rest(Worker *q, int open) {
  Machine *m = q->machine;
  for (u32 k = 0; k < q->num_ready; k++) q->ready[k]->polls = 0;
  __atomic_store_n(&q->resting_at, q->view + 1, __ATOMIC_SEQ_CST); /* 0 is not resting */
  while (!stopped(m)) {
    u32 resting = 0;
    for (u32 k = 0; k < m->num_workers; k++) resting += __atomic_load_n(&m->workers[k].resting_at, __ATOMIC_SEQ_CST) == q->view + 1;
    u64 now = all_changes(m);
    if (now != q->view) break;
    if (resting == m->num_workers) { stop(m, open ? QUIET : DONE); break; }
    struct timespec pause = {0, 20000};
    nanosleep(&pause, 0);
  }
  __atomic_store_n(&q->resting_at, 0, __ATOMIC_SEQ_CST);
}
static void *work(void *argument) {
  Worker *q = argument;
  Machine *m = q->machine;
  u64 idle = 0;
  int open = 1;
  q->look = 1;
  while (!stopped(m)) {
    if (m->shared) q->view = all_changes(m);
    if (q->look || q->seen_ends != __atomic_load_n(&m->ends, __ATOMIC_ACQUIRE)) { q->look = 0; open = dispatch(q); }
    if (!q->num_ready) { rest(q, open); q->look = 1; continue; }
    u32 slot = q->rng ? next_random(q) % q->num_ready : q->next_pick++ % q->num_ready, tries = 0;
    while (tries < q->num_ready && blocked(q, q->ready[slot])) { slot = slot + 1 == q->num_ready ? 0 : slot + 1; tries++; }
    if (tries == q->num_ready) { /* only sleepers and waves at barriers: let every sleeper look again */
      int sleepers = 0;
      for (u32 k = 0; k < q->num_ready; k++) if (q->ready[k]->sleeping) { q->ready[k]->sleeping = 0; sleepers = 1; }
      if (!sleepers || all_quiet(q)) rest(q, open);
      else if (m->shared) sched_yield();
      continue;
    }
    Wave *w = q->ready[slot];
    u64 slice = q->rng ? 1 + next_random(q) % m->quantum : m->quantum, before = w->executed, view = q->view;
    w->sleeping = 0;
    run_slice(w, slice);
    if (__atomic_add_fetch(&m->spent, w->executed - before, __ATOMIC_RELAXED) >= m->budget) stop(m, BUDGET);
    Group *g = w->group;
    if (w->state == ST_FAULT) { stop(m, FAULTED); break; }
    if (w->state == ST_BARRIER) { g->waiting++; release_barrier(q, g); }
    if (w->state == ST_END) {
      int last = g->alive == 1;
      end_wave(q, slot);
      if (!last) release_barrier(q, g);
    }
    if (q->view != view) idle = 0;
    else if (++idle > 4 * (u64)q->num_ready + 64) { /* waves that spin without sleeping */
      idle = 0;
      if (all_quiet(q)) rest(q, open);
    }
  }
  return 0;
}
/* Run up to `budget` wave instructions. */
u32 emu_step(Machine *m, u64 budget, u64 *used) {
  pthread_t threads[MAX_WORKERS];
  u32 num_threads = 0;
  m->status = RUNNING;
  m->spent = 0;
  m->budget = budget;
  for (u32 k = 0; k < m->num_workers; k++) m->workers[k].view = all_changes(m);
  for (u32 k = 1; k < m->num_workers; k++) num_threads += !pthread_create(&threads[num_threads], 0, work, &m->workers[k]);
  if (num_threads + 1 < m->num_workers) stop(m, NO_THREAD);
  work(&m->workers[0]);
  for (u32 k = 0; k < num_threads; k++) pthread_join(threads[k], 0);
  for (u32 k = m->first_open; k < m->num_launches; k++) if (m->launches[k]->done) launch_drop_memory(m, m->launches[k]);
  while (m->first_open < m->num_launches && m->launches[m->first_open]->done) m->first_open++;
  if (m->status == DONE && m->detect) check_quiet(m);
  *used = m->spent;
  return m->status;
}
