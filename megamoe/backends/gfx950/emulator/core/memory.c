/* Device memory: allocations with exact bounds, traffic counters, faults, and what tells a poll from progress. */
#include <stdarg.h>

#include "machine.h"

void fault(Wave *w, const Inst *i, u32 code, u64 address, int lane, const char *format, ...) {
  Machine *m = w->machine;
  w->state = ST_FAULT;
  u32 none = 0;
  Fault *f = &m->fault;
  if (!__atomic_compare_exchange_n(&f->code, &none, code, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) return; /* the first one counts */
  f->launch = w->launch->id;
  f->group = w->group->flat_id;
  f->wave = w->idx;
  f->inst = (u32)(i - w->launch->prog) < w->launch->num_insts ? (u32)(i - w->launch->prog) : (u32)w->pc - 1;
  f->lane = (u32)lane;
  f->address = address;
  va_list args;
  va_start(args, format);
  vsnprintf(f->text, sizeof f->text, format, args);
  va_end(args);
}

/* Allocations are sorted by base and do not overlap. */
Alloc *find_alloc(Machine *m, u64 address) {
  u32 low = 0, high = m->num_allocs;
  while (low < high) {
    u32 mid = (low + high) / 2;
    if (m->allocs[mid].base <= address) low = mid + 1; else high = mid;
  }
  if (!low) return 0;
  Alloc *a = &m->allocs[low - 1];
  return a->live && address < a->base + a->size ? a : 0;
}
static inline u32 inst_index(const Wave *w) { return (u32)w->pc - 1; }
static Alloc *cached_alloc(Wave *w, u64 address, u64 end) {
  if (end < address) return 0; /* a lane at the end of the address space: its end came round */
  Machine *m = w->machine;
  u32 *slot = &w->launch->alloc_cache[inst_index(w)];
  if (*slot < m->num_allocs) {
    Alloc *a = &m->allocs[*slot];
    if (a->live && address >= a->base && end <= a->base + a->size) return a;
  }
  Alloc *a = find_alloc(m, address);
  if (!a || end > a->base + a->size) return 0;
  *slot = (u32)(a - m->allocs);
  return a;
}
static int allowed(Wave *w, const Inst *i, Alloc *a, u64 address, int lane, int write) {
  if (a->rank >= 0 && a->rank != w->launch->rank && !a->peer_visible) {
    fault(w, i, FAULT_MEMORY, address, lane, "address %#llx is private memory of rank %d", (unsigned long long)address, a->rank);
    return 0;
  }
  if (write && a->read_only) {
    fault(w, i, FAULT_MEMORY, address, lane, "address %#llx is in a read-only allocation", (unsigned long long)address);
    return 0;
  }
  return 1;
}
/* Whether every active lane may access `bytes` at its address; reports the first one that may not. */
int check_lanes(Wave *w, const Inst *i, const u64 *addr, u64 exec, int bytes, int write) {
  u64 low = ~(u64)0, high = 0;
  w->span = 0;
  if (exec == ~(u64)0) for (int l = 0; l < LANES; l++) { low = addr[l] < low ? addr[l] : low; high = addr[l] > high ? addr[l] : high; }
  else for (u64 left = exec; left; left &= left - 1) { u64 at = addr[__builtin_ctzll(left)]; if (at < low) low = at; if (at > high) high = at; }
  if (!exec) return 1;
  Alloc *a = cached_alloc(w, low, high + bytes);
  if (a) { w->span = a; return allowed(w, i, a, low, -1, write); }
  for (int l = 0; l < LANES; l++) {
    if (!(exec >> l & 1)) continue;
    a = find_alloc(w->machine, addr[l]);
    if (!a || addr[l] + bytes > a->base + a->size) {
      fault(w, i, FAULT_MEMORY, addr[l], l, "%s of %d bytes at %#llx is outside of every allocation%s", write ? "store" : "load", bytes,
            (unsigned long long)addr[l], a ? " (it runs over the end of one)" : "");
      return 0;
    }
    if (!allowed(w, i, a, addr[l], l, write)) return 0;
  }
  return 1;
}
static int width_class(int bytes) { return bytes <= 1 ? 0 : bytes <= 2 ? 1 : bytes <= 4 ? 2 : bytes <= 8 ? 3 : bytes <= 12 ? 4 : bytes <= 16 ? 5 : bytes <= 32 ? 6 : 7; }
void count_traffic(Wave *w, const Inst *i, const u64 *addr, u64 exec, int bytes, int what) {
  (void)i;
  if (!exec) return;
  Traffic *t = w->launch->traffic;
  Alloc *a = 0;
  u64 *row = 0, sum = 0, remote = 0;
  int k = width_class(bytes);
  if (w->span) { /* as nearly always, one allocation holds all lanes */
    sum = (u64)bytes * (u64)__builtin_popcountll(exec);
    t->bytes[what][w->span->klass % NUM_CLASSES][k] += sum;
    if (w->span->rank >= 0 && w->span->rank != w->launch->rank) t->remote_bytes[what] += sum;
    return;
  }
  for (int l = 0; l < LANES; l++) {
    if (!(exec >> l & 1)) continue;
    if (!a || addr[l] < a->base || addr[l] >= a->base + a->size) {
      if (row) { row[k] += sum; if (a->rank >= 0 && a->rank != w->launch->rank) remote += sum; }
      a = cached_alloc(w, addr[l], addr[l] + 1);
      if (!a) return;
      row = t->bytes[what][a->klass % NUM_CLASSES];
      sum = 0;
    }
    sum += (u64)bytes;
  }
  if (row) { row[k] += sum; if (a->rank >= 0 && a->rank != w->launch->rank) remote += sum; }
  t->remote_bytes[what] += remote;
}

void note_progress(Wave *w) { made_progress(w->worker); w->polls = 0; }
/* A load that gives what the same load gave before, while nothing changed anywhere, is a poll. */
void note_poll(Wave *w, const Inst *i, u64 address, u64 value) {
  (void)i;
  u64 pc = inst_index(w);
  u32 slot = (u32)(address >> 2 ^ pc * 7) & 31;
  w->poll_addr = address;
  w->poll_value = value;
  w->poll_pc = pc;
  if (w->poll_change != w->worker->view) { w->poll_change = w->worker->view; w->polls = 0; }
  if (w->seen[slot].addr == address && w->seen[slot].value == value && w->seen[slot].pc == pc) { w->polls++; return; }
  w->seen[slot].addr = address;
  w->seen[slot].value = value;
  w->seen[slot].pc = pc;
  w->polls = 0;
}

void *scratch_at(Wave *w, const Inst *i, u32 offset, int lane, int bytes) {
  u32 size = w->launch->scratch_bytes;
  if ((u64)offset + (u64)bytes > size || !w->scratch) {
    fault(w, i, FAULT_MEMORY, offset, lane, "scratch offset %u with %d bytes is outside of the %u bytes of a lane", offset, bytes, size);
    return 0;
  }
  return w->scratch + (u64)lane * size + offset;
}
void op_unimplemented(Wave *w, const Inst *i) { fault(w, i, FAULT_UNIMPLEMENTED, i->offset, -1, "instruction is not implemented"); }
