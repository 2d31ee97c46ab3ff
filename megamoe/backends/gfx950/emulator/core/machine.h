/* What the host's side of the device, the dispatcher and the schedulers share. */
#pragma once
#include "emu.h"

int emu_alloc_remove(Machine *m, u64 base);
void emu_schedule(Machine *m, u32 seed, u32 quantum);
void launch_drop_memory(Machine *m, Launch *l);
int dispatch(Worker *q);
void end_wave(Worker *q, u32 slot);
void release_barrier(Worker *q, Group *g);
void made_progress(Worker *q);
static inline u32 worker_of(const Machine *m, i32 rank) { return (u32)rank % m->num_workers; }
