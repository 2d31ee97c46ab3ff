/* Results of scalar instructions. */
#pragma once
#include "emu.h"

static inline void put(Wave *w, const Inst *i, u32 x) { w->s[i->dst.idx] = x; }
static inline void put64(Wave *w, const Inst *i, u64 x) { set_pair(&w->s[i->dst.idx], x); }
