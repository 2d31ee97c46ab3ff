/* What the vector-memory instructions share: lane addresses, narrow values, the order of access and detector. */
#pragma once
#include "emu.h"

enum { SEG_FLAT, SEG_SCRATCH, SEG_GLOBAL };
enum { EXT_NONE, EXT_SIGNED, EXT_D16, EXT_D16_HI, EXT_D16_S, EXT_D16_HI_S };

/* Where each lane goes. `exec` has the lanes in global memory, `lds` and `scratch` those of a FLAT aperture or of SCRATCH,
 * `partial` those that a buffer's bound cuts. `host` is the pointer once the address is checked. */
typedef struct { u64 addr[LANES], host[LANES], exec, lds, scratch, dropped, partial; } Lanes;
int lane_addresses(Wave *w, const Inst *i, int segment, int bytes, int write, Lanes *x);
int aligned_lanes(Wave *w, const Inst *i, const Lanes *x, int bytes);
void buffer_addresses(Wave *w, const Inst *i, int bytes, Lanes *x, u32 *offset, u64 *limit);

static inline u32 raw(u64 p, int bytes) {
  if (bytes == 4) return __atomic_load_n((u32 *)(uintptr_t)p, __ATOMIC_RELAXED);
  return bytes == 2 ? *(volatile u16 *)(uintptr_t)p : *(volatile u8 *)(uintptr_t)p;
}
static inline void raw_store(u64 p, int bytes, u32 x) {
  if (bytes == 4) __atomic_store_n((u32 *)(uintptr_t)p, x, __ATOMIC_RELAXED);
  else if (bytes == 2) *(volatile u16 *)(uintptr_t)p = (u16)x;
  else *(volatile u8 *)(uintptr_t)p = (u8)x;
}
static inline u32 extended(u32 d, u32 x, int bytes, int ext) {
  if (ext == EXT_SIGNED || ext == EXT_D16_S || ext == EXT_D16_HI_S) x = bytes == 1 ? (u32)(i32)(int8_t)x : (u32)(i32)(int16_t)x;
  if (ext == EXT_D16 || ext == EXT_D16_S) return (d & 0xffff0000u) | (x & 0xffff);
  if (ext == EXT_D16_HI || ext == EXT_D16_HI_S) return (d & 0xffff) | x << 16;
  return x;
}
#define FOR_ACTIVE(l, mask) for (u64 left_ = (mask); left_ && ((l) = __builtin_ctzll(left_), 1); left_ &= left_ - 1)
