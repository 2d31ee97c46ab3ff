/* State of the emulated device and the helpers that every opcode family uses.
 *
 * A wave runs instructions through function pointers (`Inst.fn`). Vector registers are rows of 64 lanes. Rows past the
 * kernel's own (`tmp_row`) are scratch for modifiers. Everything a detector needs hangs off `Wave.chk`, which is null
 * when the detectors are off. */
#pragma once
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef int32_t i32;
typedef uint64_t u64;
typedef int64_t i64;

enum { MAX_WORKERS = 64, LANES = 64, NUM_SGPRS = 128, TMP_ROWS = 40, MAX_MATES = 16 };
enum { SG_VCC = 106, SG_M0 = 124, SG_EXEC = 126 };
enum { K_NONE, K_VGPR, K_SGPR, K_CONST, K_SPECIAL };
enum { ST_RUN, ST_BARRIER, ST_END, ST_YIELD, ST_FAULT };
enum { SCOPE_WAVE, SCOPE_GROUP, SCOPE_AGENT, SCOPE_SYSTEM };

typedef struct Wave Wave;
typedef struct Inst Inst;
typedef struct Group Group;
typedef struct Launch Launch;
typedef struct Machine Machine;
typedef struct WaveCheck WaveCheck;
typedef void (*Handler)(Wave *, const Inst *);

typedef struct { u8 kind, width; u16 idx; u32 lo, hi; } Operand;
typedef struct { u16 first, count; } Range;

/* One decoded instruction; native.py mirrors this layout. Register ranges count VGPRs from 0, SGPRs from 1024. */
struct Inst {
  u64 fn, inner;
  u32 offset, target;
  u16 op, pad0;
  u8 nsrc, size, neg, abs, neg_hi, opsel, opsel_hi, clamp;
  u8 omod, cbsz, abid, blgp, sc0, sc1, nt, lds;
  u8 offen, idxen, is_vector, bitop3, has_dpp, has_sdwa, bound_ctrl, row_mask;
  u8 bank_mask, dst_sel, dst_unused, src0_sel, src1_sel, src0_sext, src1_sext, bytes;
  u16 dpp, simm;
  i32 imm, imm1;
  Operand dst, sdst, src[6];
  u8 nreads, nwrites, in_order, scope;
  Range reads[8], writes[3];
};
#define CALL(i, w) ((Handler)(uintptr_t)(i)->fn)(w, i)

typedef struct {
  u64 base, size;
  i32 rank;          /* -1: every rank */
  u8 peer_visible, read_only, klass, live;
  u32 id;
  struct ShadowPage **pages;
} Alloc;

struct Wave {
  u32 (*v)[LANES];
  u32 s[NUM_SGPRS + 8];
  u32 mask[LANES] __attribute__((aligned(64)));
  u64 mask_exec;
  u32 scc, mode, state, indexed, id, idx, num_rows, tmp_row, sleeping;
  u64 pc, executed, polls, poll_change, parked_change, poll_addr, poll_value, poll_pc;
  struct { u64 addr, value, pc; } seen[32]; /* recent loads: an equal one again is a poll */
  u8 *scratch;
  Alloc *span; /* the allocation that held all lanes of the last access, if one did */
  Group *group;
  Launch *launch;
  Machine *machine;
  struct Worker *worker;
  WaveCheck *chk;
};

struct Group {
  Launch *launch;
  u8 *lds;
  u32 lds_bytes, num_waves, alive, waiting, id[3], flat_id, cu, xcd, epoch, first_wave_id;
  struct LdsCheck *chk;
  Wave **waves;
};

enum { NUM_CLASSES = 16, NUM_WIDTHS = 8 };
typedef struct {
  u64 bytes[3][NUM_CLASSES][NUM_WIDTHS]; /* load, store, atomic; by class of allocation and width of access */
  u64 remote_bytes[3], lds_bytes[2], dma_bytes, instructions;
} Traffic;

struct Launch {
  Inst *prog;
  u64 *counts;
  u32 num_insts, num_rows, lds_bytes, scratch_bytes, num_user_sgprs, rsrc2, properties, mode, preload, preload_offset;
  i32 rank;
  u32 grid[3], block[3], id, num_deps, next_group, num_groups, live_groups, done, started, unwanted;
  u32 deps[32];
  u8 *kernarg, *packet;
  u32 *alloc_cache;
  Traffic *traffic;
  struct Clock *clock;
  u32 done_before; /* number of launches queued when it ended */
  u64 prologue;
};

typedef struct { u32 kind, launch, group, wave, inst, o_launch, o_group, o_wave, o_inst, o_write; u64 address; u64 extra; } Finding;

enum { MAX_FINDINGS = 256 };
typedef struct {
  u32 code, launch, group, wave, inst, lane;
  u64 address, extra;
  char text[256];
} Fault;

/* One scheduler: the waves of the ranks whose number modulo the number of workers is `index`. */
typedef struct Worker {
  Machine *machine;
  Wave **ready;
  u32 index, num_ready, cap_ready, next_pick, look, rng, seen_ends;
  u64 change, view; /* own progress; everybody's, as last seen */
  u64 clock, resting_at;
} __attribute__((aligned(128))) Worker;
typedef struct { u32 lds, waves; } Unit; /* in use of a compute unit */

struct Machine {
  Alloc *allocs;
  u32 num_allocs, cap_allocs;
  Launch **launches;
  u32 num_launches, cap_launches, first_open;
  u32 num_ranks, num_cus, num_xcds, lds_per_cu, detect, max_groups, quantum, num_workers, shared;
  Unit *units; /* [rank][cu] */
  Worker *workers;
  u32 status, ends; /* why the workers stop; number of launches that ended */
  u64 spent, budget;
  Fault fault;
  Finding findings[MAX_FINDINGS];
  u32 num_findings;
  u64 num_findings_total;
  struct RaceState *races;
  pthread_mutex_t race_lock, report_lock; /* history of global memory; findings and the fault */
};

enum { DETECT_WAITS = 1, DETECT_LDS = 2, DETECT_GLOBAL = 4 };

static inline u64 exec_of(const Wave *w) { return w->s[SG_EXEC] | (u64)w->s[SG_EXEC + 1] << 32; }
static inline u64 pair(const u32 *s) { return s[0] | (u64)s[1] << 32; }
static inline void set_pair(u32 *s, u64 x) { s[0] = (u32)x; s[1] = (u32)(x >> 32); }
static inline float as_f(u32 x) { float f; memcpy(&f, &x, 4); return f; }
static inline u32 as_u(float f) { u32 x; memcpy(&x, &f, 4); return x; }
static inline double as_d(u64 x) { double d; memcpy(&d, &x, 8); return d; }
static inline u64 as_q(double d) { u64 x; memcpy(&x, &d, 8); return x; }

/* Lane masks of EXEC, recomputed only when it changes. */
static inline const u32 *lanes_of(Wave *w) {
  u64 m = exec_of(w);
  if (m != w->mask_exec) {
    for (int l = 0; l < LANES; l++) w->mask[l] = -(u32)(m >> l & 1);
    w->mask_exec = m;
  }
  return w->mask;
}

/* Scalar reads. A vector source reads its first active lane (that only happens in v_readfirstlane and the like). */
u32 special_value(const Wave *w, u32 code, int half);
static inline u32 sread(const Wave *w, const Operand *o) {
  if (o->kind == K_SGPR) return w->s[o->idx];
  if (o->kind == K_CONST) return o->lo;
  return special_value(w, o->idx, 0);
}
static inline u64 sread64(const Wave *w, const Operand *o) {
  if (o->kind == K_SGPR) return pair(&w->s[o->idx]);
  if (o->kind == K_CONST) return o->lo | (u64)o->hi << 32;
  return special_value(w, o->idx, 0) | (u64)special_value(w, o->idx, 1) << 32;
}

#define FOR_LANES _Pragma("GCC ivdep") for (int l = 0; l < LANES; l++)

/* Source k as 64 words; `half` 1 is the second dword of a wide operand. `sign` is the sign bit that neg/abs act on. */
static inline const u32 *source_row(Wave *w, const Inst *i, int k, int half, u32 *t, u32 sign) {
  const Operand *o = &i->src[k];
  const u32 *r;
  if (o->kind == K_VGPR) {
    r = w->v[o->idx + half];
  } else {
    u32 x = o->kind == K_SGPR ? w->s[o->idx + half] : o->kind == K_CONST ? (half ? o->hi : o->lo) : special_value(w, o->idx, half);
    for (int l = 0; l < LANES; l++) t[l] = x;
    r = t;
  }
  if (sign && ((i->neg | i->abs) >> k & 1)) {
    u32 keep = i->abs >> k & 1 ? ~sign : ~0u, flip = i->neg >> k & 1 ? sign : 0;
    for (int l = 0; l < LANES; l++) t[l] = (r[l] & keep) ^ flip;
    r = t;
  }
  return r;
}
static inline void merge_row(Wave *w, u32 *d, const u32 *x) {
  const u32 *m = lanes_of(w);
  FOR_LANES d[l] = (d[l] & ~m[l]) | (x[l] & m[l]);
}

void fault(Wave *w, const Inst *i, u32 code, u64 address, int lane, const char *format, ...);
enum { FAULT_MEMORY = 1, FAULT_UNIMPLEMENTED, FAULT_LDS, FAULT_MODE, FAULT_TRAP };

/* Numbers of other formats. */
static inline u16 bf16_of(float f) {
  u32 u = as_u(f);
  if ((u & 0x7fffffff) > 0x7f800000) return (u16)(u >> 16 | 0x40);
  return (u16)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
static inline float half_to_f(u32 h) { _Float16 x; u16 b = (u16)h; memcpy(&x, &b, 2); return (float)x; }
static inline u32 f_to_half(float f) { _Float16 x = (_Float16)f; u16 b; memcpy(&b, &x, 2); return b; }
float fp8_to_f(u32 x);
float bf8_to_f(u32 x);
float fp4_to_f(u32 x);
float fp6_to_f(u32 x);
float bf6_to_f(u32 x);

/* Memory (memory.c). Addresses of active lanes are checked before the access. */
Alloc *find_alloc(Machine *m, u64 address);
int check_lanes(Wave *w, const Inst *i, const u64 *addr, u64 exec, int bytes, int write);
void count_traffic(Wave *w, const Inst *i, const u64 *addr, u64 exec, int bytes, int what);
void note_progress(Wave *w);
void note_poll(Wave *w, const Inst *i, u64 address, u64 value);
enum { LDS_READ, LDS_WRITE, LDS_ATOMIC, LDS_LOADED };
u8 *lds_lanes(Wave *w, const Inst *i, const u32 *address, u64 exec, int bytes, int use);
void *scratch_at(Wave *w, const Inst *i, u32 offset, int lane, int bytes);

/* Detectors (check.c, race.c): called only when w->chk is set. */
void check_registers(Wave *w, const Inst *i);
void check_moved(Wave *w, const Inst *i, const Inst *moved);
void check_issue(Wave *w, const Inst *i, int counters, int is_store);
void check_wait(Wave *w, u32 simm);
void check_lds(Wave *w, const Inst *i, const u32 *address, u64 exec, int bytes, int write, int dma);
void check_global(Wave *w, const Inst *i, const u64 *address, u64 exec, int bytes, int write, int atomic, int scope);
void check_fence(Wave *w, const Inst *i, int release, int scope);
void check_barrier(Group *g);
void check_reserve_ids(Machine *m, Group *g);
void check_wave_start(Wave *w);
void check_wave_end(Wave *w);
void check_launch_start(Machine *m, Launch *l);
void check_launch_end(Machine *m, Launch *l);
void check_group_start(Group *g);
void check_group_end(Group *g);
void check_quiet(Machine *m);
void check_begin(Machine *m);
void check_free(Machine *m);
void free_shadow(Alloc *a);
enum { CNT_VM = 1, CNT_LGKM = 2, CNT_SMEM = 4, CNT_LDS_DMA = 8, CNT_FENCE_REL = 16, CNT_FENCE_ACQ = 32 };

static inline void race_enter(Wave *w) { if (w->machine->shared && w->chk) pthread_mutex_lock(&w->machine->race_lock); }
static inline void race_leave(Wave *w) { if (w->machine->shared && w->chk) pthread_mutex_unlock(&w->machine->race_lock); }

/* Handlers are found by name. */
typedef struct { const char *name; Handler fn; } OpEntry;
#define ENTRY(name, ...) {#name, op_##name},
void exec_modified(Wave *w, const Inst *i);
void exec_indexed(Wave *w, const Inst *i);
void op_unimplemented(Wave *w, const Inst *i);
