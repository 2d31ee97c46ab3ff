/* State of the detectors. A vector clock counts, per wave id, the memory operations of that wave that are known.
 *
 * What a wave knows of the waves of its own workgroup is kept at four levels: seen (issued before a barrier), performed
 * (their waitcnt is done), visible to the device (written back, agent scope), visible to all ranks (system scope). What
 * it knows of other workgroups travels only through flags: a scoped store or atomic publishes, a scoped load acquires. */
#pragma once
#include "shadow.h"

enum { CHUNK = 64 };
typedef struct Chunk { u32 refs, v[CHUNK]; } Chunk;
typedef struct Clock { u32 n; Chunk **c; } Clock; /* shared chunks of CHUNK entries */
enum { LV_SEEN, LV_PERFORMED, LV_AGENT, LV_SYSTEM, NUM_LEVELS };
enum { MAX_PENDING = 64 };

typedef struct {
  u32 counters, seq, inst, lds_time; /* CNT_ bits; own operation number; instruction; time on the LDS clock */
  u16 first[3], count[3];  /* registers it writes */
  u8 num_writes, fence_scope;
  struct Snapshot *acquired;
  u32 performed_at_issue[MAX_MATES];
} Pending;

struct WaveCheck {
  u64 wait_bits[24]; /* registers with a result outstanding: rows 0-511, scalars from bit 1024 */
  u32 num_wait_bits, overlaid; /* overlaid: a load has been issued to a register that an earlier one still loads */
  u32 wait_inst[1280];
  Pending queue[2][MAX_PENDING]; /* vm, lgkm */
  u32 head[2], size[2];
  u32 id, seq, slot; /* global id, own operation count, index in the workgroup */
  u32 dma_done;      /* own operation number up to which loads into LDS have been waited for */
  u32 level[NUM_LEVELS][MAX_MATES];
  Clock known, acquired, performed; /* visible; acquired but not yet behind a buffer_inv; performed beyond these */
  u32 acquired_scope;
  const Clock *base; /* what its launch knew at its start */
  struct Snapshot *pending_load, *last_acquired;
};

struct LdsCheck {
  Line *lines;
  u32 num_lines, clock, known[2][MAX_MATES]; /* what every wave had waited for at the last barrier: LDS operations, loads into LDS */
  u32 news; /* some wave learnt something since the last barrier */
};

typedef struct Snapshot { u32 refs; u32 scope; Clock performed, agent, system; i32 rank; } Snapshot;
typedef struct { u64 address; Snapshot *s; } Flag;
typedef struct { u32 launch, group, wave; i32 rank; u32 first_mate, mates; } WaveInfo;
typedef struct RaceState {
  u32 generation, num_ids, cap_ids;
  WaveInfo *ids;
  Flag *flags;
  u32 cap_flags, num_flags;
} RaceState;

void clock_join(Clock *a, const Clock *b);
void clock_set(Clock *a, u32 id, u32 value);
static inline u32 clock_get(const Clock *a, u32 id) { return id / CHUNK < a->n && a->c[id / CHUNK] ? a->c[id / CHUNK]->v[id % CHUNK] : 0; }
void clock_copy(Clock *a, const Clock *b);
void clock_free(Clock *a);
void snapshot_drop(Snapshot *s);
Snapshot *snapshot_of(Wave *w, int scope);
void publish(Wave *w, u64 address, Snapshot *own, int rmw);
void acquire(Wave *w, u64 address);
u32 lds_done(const Wave *w);
void race_complete(Wave *w, Pending *p);
void add_finding(Wave *w, const Inst *i, u32 kind, u64 address, u32 o_launch, u32 o_group, u32 o_wave, u32 o_inst, u32 o_write);
enum { FOUND_REGISTER = 1, FOUND_LDS_RACE, FOUND_LDS_WAIT, FOUND_GLOBAL_RACE };
