/* FLAT, GLOBAL, SCRATCH and MUBUF: loads, stores, atomics, loads into LDS, cache control.
 *
 * An address above 2^48 in a FLAT instruction is an aperture: LDS or scratch. */
#include "emu.h"

enum { SEG_FLAT, SEG_SCRATCH, SEG_GLOBAL };
enum { EXT_NONE, EXT_SIGNED, EXT_D16, EXT_D16_HI, EXT_D16_S, EXT_D16_HI_S };
#define LDS_APERTURE 0x0001000000000000ull
#define SCRATCH_APERTURE 0x0002000000000000ull

static inline u32 raw(u64 p, int bytes) {
  if (bytes == 4) return __atomic_load_n((u32 *)(uintptr_t)p, __ATOMIC_RELAXED);
  return bytes == 2 ? *(volatile u16 *)(uintptr_t)p : *(volatile u8 *)(uintptr_t)p;
}
static inline void raw_store(u64 p, int bytes, u32 x) {
  if (bytes == 4) __atomic_store_n((u32 *)(uintptr_t)p, x, __ATOMIC_RELAXED);
  else if (bytes == 2) *(volatile u16 *)(uintptr_t)p = (u16)x;
  else *(volatile u8 *)(uintptr_t)p = (u8)x;
}
static inline void put_small(u32 *d, u32 x, int bytes, int ext) {
  if (ext == EXT_SIGNED || ext == EXT_D16_S || ext == EXT_D16_HI_S) x = bytes == 1 ? (u32)(i32)(int8_t)x : (u32)(i32)(int16_t)x;
  if (ext == EXT_D16 || ext == EXT_D16_S) *d = (*d & 0xffff0000u) | (x & 0xffff);
  else if (ext == EXT_D16_HI || ext == EXT_D16_HI_S) *d = (*d & 0xffff) | x << 16;
  else *d = x;
}

/* Lane addresses; `exec` loses the lanes that a buffer's bounds drop. Aperture lanes are moved to *lds and *scratch. */
typedef struct { u64 addr[LANES], exec, lds, scratch, dropped; } Lanes;
static int addresses(Wave *w, const Inst *i, int segment, Lanes *x) {
  x->exec = exec_of(w);
  x->lds = x->scratch = x->dropped = 0;
  const Operand *va = &i->src[0], *sa = &i->src[i->nsrc - 1];
  if (segment == SEG_SCRATCH) {
    u32 base = (u32)i->imm + (sa->kind == K_SGPR ? w->s[sa->idx] : 0);
    for (int l = 0; l < LANES; l++) x->addr[l] = base + (va->kind == K_VGPR ? w->v[va->idx][l] : 0);
    x->scratch = x->exec;
    x->exec = 0;
    return 1;
  }
  const u32 *lo = w->v[va->idx];
  if (sa->kind == K_SGPR) {
    u64 base = pair(&w->s[sa->idx]) + (u64)(i64)i->imm;
    for (int l = 0; l < LANES; l++) x->addr[l] = base + lo[l];
    return 1;
  }
  const u32 *hi = w->v[va->idx + 1];
  for (int l = 0; l < LANES; l++) x->addr[l] = (lo[l] | (u64)hi[l] << 32) + (u64)(i64)i->imm;
  if (segment == SEG_FLAT)
    for (int l = 0; l < LANES; l++) {
      u64 aperture = x->addr[l] & 0xffff000000000000ull, bit = (u64)1 << l;
      if (!aperture || !(x->exec & bit)) continue;
      if (aperture == LDS_APERTURE) x->lds |= bit;
      else if (aperture == SCRATCH_APERTURE) x->scratch |= bit;
      else { fault(w, i, FAULT_MEMORY, x->addr[l], l, "flat address %#llx is in no aperture", (unsigned long long)x->addr[l]); return 0; }
      x->exec &= ~bit;
      x->addr[l] &= 0xffffffff;
    }
  return 1;
}
static u8 *lds_at(Wave *w, const Inst *i, u32 at, int lane, int bytes) {
  if ((u64)at + (u64)bytes > w->group->lds_bytes) {
    fault(w, i, FAULT_LDS, at, lane, "LDS address %u with %d bytes is outside of the %u bytes of the workgroup", at, bytes, w->group->lds_bytes);
    return 0;
  }
  return w->group->lds + at;
}

static void load(Wave *w, const Inst *i, int segment, int bytes, int ext) {
  Lanes x;
  u32 out[4][LANES];
  int words = bytes > 4 ? bytes / 4 : 1, piece = bytes < 4 ? bytes : 4;
  if (!addresses(w, i, segment, &x) || !check_lanes(w, i, x.addr, x.exec, bytes, 0)) return;
  u64 all = x.exec | x.lds | x.scratch;
  for (int l = 0; l < LANES; l++) {
    if (!(all >> l & 1)) continue;
    u64 p = x.addr[l];
    if (x.lds >> l & 1) {
      u8 *q = lds_at(w, i, (u32)p, l, bytes);
      if (!q) return;
      if (w->chk) check_lds(w, i, (u32)p, bytes, 0, 0);
      p = (u64)(uintptr_t)q;
    } else if (x.scratch >> l & 1) {
      void *q = scratch_at(w, i, (u32)p, l, bytes);
      if (!q) return;
      p = (u64)(uintptr_t)q;
    }
    for (int k = 0; k < words; k++) out[k][l] = raw(p + 4 * k, piece);
  }
  for (int k = 0; k < words; k++) {
    u32 *d = w->v[i->dst.idx + k];
    for (int l = 0; l < LANES; l++) if (all >> l & 1) { if (piece == 4) d[l] = out[k][l]; else put_small(&d[l], out[k][l], piece, ext); }
  }
  if (x.exec) {
    int first = __builtin_ctzll(x.exec);
    count_traffic(w, i, x.addr, x.exec, bytes, 0);
    note_poll(w, i, x.addr[first], out[0][first]);
  }
  if (w->chk) {
    for (int l = 0; l < LANES; l++) if (x.exec >> l & 1) check_global(w, i, x.addr[l], bytes, 0, 0, i->scope);
    check_issue(w, i, segment == SEG_FLAT ? CNT_VM | CNT_LGKM : CNT_VM, 0);
  }
}
static void store(Wave *w, const Inst *i, int segment, int bytes, int high) {
  Lanes x;
  int words = bytes > 4 ? bytes / 4 : 1, piece = bytes < 4 ? bytes : 4;
  if (!addresses(w, i, segment, &x) || !check_lanes(w, i, x.addr, x.exec, bytes, 1)) return;
  u64 all = x.exec | x.lds | x.scratch;
  const Operand *data = &i->src[1];
  for (int l = 0; l < LANES; l++) {
    if (!(all >> l & 1)) continue;
    u64 p = x.addr[l];
    if (x.lds >> l & 1) {
      u8 *q = lds_at(w, i, (u32)p, l, bytes);
      if (!q) return;
      if (w->chk) check_lds(w, i, (u32)p, bytes, 1, 0);
      p = (u64)(uintptr_t)q;
    } else if (x.scratch >> l & 1) {
      void *q = scratch_at(w, i, (u32)p, l, bytes);
      if (!q) return;
      p = (u64)(uintptr_t)q;
    } else if (w->chk) {
      check_global(w, i, p, bytes, 1, 0, i->scope);
    }
    for (int k = 0; k < words; k++) { u32 v = w->v[data->idx + k][l]; raw_store(p + 4 * k, piece, high ? v >> 16 : v); }
  }
  count_traffic(w, i, x.addr, x.exec, bytes, 1);
  if (x.exec | x.lds) note_progress(w);
  if (w->chk) check_issue(w, i, segment == SEG_FLAT ? CNT_VM | CNT_LGKM : CNT_VM, 1);
}

/* Atomics: X(name, expression of the old value o and the operand d). */
static inline u32 pk_add_half(u32 o, u32 d) {
  return f_to_half(half_to_f(o & 0xffff) + half_to_f(d & 0xffff)) | f_to_half(half_to_f(o >> 16) + half_to_f(d >> 16)) << 16;
}
static inline u32 pk_add_bf16(u32 o, u32 d) {
  return bf16_of(as_f(o << 16) + as_f(d << 16)) | (u32)bf16_of(as_f(o & 0xffff0000u) + as_f(d & 0xffff0000u)) << 16;
}
#define ATOMIC32_LIST(X) \
  X(swap, d) X(add, o + d) X(sub, o - d) X(smin, (i32)o < (i32)d ? o : d) X(umin, o < d ? o : d) X(smax, (i32)o > (i32)d ? o : d) X(umax, o > d ? o : d) \
  X(and, o & d) X(or, o | d) X(xor, o ^ d) X(inc, o >= d ? 0 : o + 1) X(dec, o == 0 || o > d ? d : o - 1) X(add_f32, as_u(as_f(o) + as_f(d))) \
  X(pk_add_f16, pk_add_half(o, d)) X(pk_add_bf16, pk_add_bf16(o, d)) X(cmpswap, o == cmp ? d : o)
#define ATOMIC64_LIST(X) \
  X(swap_x2, d) X(add_x2, o + d) X(sub_x2, o - d) X(smin_x2, (i64)o < (i64)d ? o : d) X(umin_x2, o < d ? o : d) X(smax_x2, (i64)o > (i64)d ? o : d) \
  X(umax_x2, o > d ? o : d) X(and_x2, o & d) X(or_x2, o | d) X(xor_x2, o ^ d) X(inc_x2, o >= d ? 0 : o + 1) X(dec_x2, o == 0 || o > d ? d : o - 1) \
  X(add_f64, as_q(as_d(o) + as_d(d))) X(min_f64, as_q(fmin(as_d(o), as_d(d)))) X(max_f64, as_q(fmax(as_d(o), as_d(d)))) X(cmpswap_x2, o == cmp ? d : o)
typedef u32 (*Step32)(u32 o, u32 d, u32 cmp);
typedef u64 (*Step64)(u64 o, u64 d, u64 cmp);
#define DEF_STEP32(name, e) static u32 step_##name(u32 o, u32 d, u32 cmp) { (void)o; (void)d; (void)cmp; return (e); }
#define DEF_STEP64(name, e) static u64 step_##name(u64 o, u64 d, u64 cmp) { (void)o; (void)d; (void)cmp; return (e); }
ATOMIC32_LIST(DEF_STEP32)
ATOMIC64_LIST(DEF_STEP64)

static void atomic_lanes(Wave *w, const Inst *i, const u64 *addr, u64 exec, int vdata, Step32 f32, Step64 f64, int is_flat) {
  int bytes = f64 ? 8 : 4;
  u32 keep[2][LANES];
  for (int l = 0; l < LANES; l++)
    if (exec >> l & 1 && addr[l] % (u64)bytes) { fault(w, i, FAULT_MEMORY, addr[l], l, "atomic at %#llx is not aligned to %d bytes", (unsigned long long)addr[l], bytes); return; }
  if (!check_lanes(w, i, addr, exec, bytes, 1)) return;
  int changed = 0, first = exec ? __builtin_ctzll(exec) : 0;
  for (int l = 0; l < LANES; l++) {
    if (!(exec >> l & 1)) continue;
    if (w->chk) check_global(w, i, addr[l], bytes, 1, 1, i->scope);
    if (f32) {
      u32 *p = (u32 *)(uintptr_t)addr[l], d = w->v[vdata][l], cmp = f32 == step_cmpswap ? w->v[vdata + 1][l] : 0, o = __atomic_load_n(p, __ATOMIC_SEQ_CST), n;
      do n = f32(o, d, cmp); while (!__atomic_compare_exchange_n(p, &o, n, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
      keep[0][l] = o;
      changed |= o != n;
    } else {
      u64 *p = (u64 *)(uintptr_t)addr[l], d = w->v[vdata][l] | (u64)w->v[vdata + 1][l] << 32, o = __atomic_load_n(p, __ATOMIC_SEQ_CST), n;
      u64 cmp = f64 == step_cmpswap_x2 ? w->v[vdata + 2][l] | (u64)w->v[vdata + 3][l] << 32 : 0;
      do n = f64(o, d, cmp); while (!__atomic_compare_exchange_n(p, &o, n, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
      keep[0][l] = (u32)o;
      keep[1][l] = (u32)(o >> 32);
      changed |= o != n;
    }
  }
  if (i->dst.kind == K_VGPR)
    for (int k = 0; k < bytes / 4; k++) { u32 *d = w->v[i->dst.idx + k]; for (int l = 0; l < LANES; l++) if (exec >> l & 1) d[l] = keep[k][l]; }
  count_traffic(w, i, addr, exec, bytes, 2);
  if (exec) note_poll(w, i, addr[first], keep[0][first]);
  if (changed) note_progress(w);
  if (w->chk) check_issue(w, i, is_flat ? CNT_VM | CNT_LGKM : CNT_VM, 1);
}
static void atomic_flat(Wave *w, const Inst *i, int segment, Step32 f32, Step64 f64) {
  Lanes x;
  if (!addresses(w, i, segment, &x)) return;
  if (x.lds | x.scratch) { fault(w, i, FAULT_UNIMPLEMENTED, x.addr[0], -1, "flat atomic on LDS or scratch"); return; }
  atomic_lanes(w, i, x.addr, x.exec, i->src[1].idx, f32, f64, segment == SEG_FLAT);
}

/* A buffer address; lanes past num_records are dropped: loads give zero, stores do nothing. */
static void buffer_addresses(Wave *w, const Inst *i, int bytes, Lanes *x, u32 *offset, u64 *limit) {
  const u32 *r = &w->s[i->src[1].idx];
  u64 base = (r[0] | (u64)r[1] << 32) & 0xffffffffffffull;
  u32 stride = r[1] >> 16 & 0x3fff, soffset = sread(w, &i->src[2]);
  const Operand *va = &i->src[0];
  x->exec = exec_of(w);
  x->dropped = x->lds = x->scratch = 0;
  *limit = r[2];
  for (int l = 0; l < LANES; l++) {
    u64 index = i->idxen ? w->v[va->idx][l] : 0;
    u32 off = (u32)i->imm + (i->offen ? w->v[va->idx + (i->idxen ? 1 : 0)][l] : 0);
    u64 at = (u64)off + soffset;
    offset[l] = (u32)at;
    x->addr[l] = base + index * stride + at;
    u64 end = stride && i->idxen ? (index >= *limit ? ~(u64)0 : 0) : at + (u64)(bytes < 4 ? bytes : 4);
    if (stride && i->idxen ? end != 0 : end > *limit) x->dropped |= (u64)1 << l;
  }
  x->dropped &= x->exec;
  x->exec &= ~x->dropped;
}
static void buffer_load(Wave *w, const Inst *i, int bytes, int ext) {
  Lanes x;
  u32 out[4][LANES], offset[LANES];
  u64 limit, partial = 0, all = exec_of(w);
  int words = bytes > 4 ? bytes / 4 : 1, piece = bytes < 4 ? bytes : 4;
  buffer_addresses(w, i, bytes, &x, offset, &limit);
  for (int l = 0; l < LANES; l++) if (x.exec >> l & 1 && !i->idxen && (u64)offset[l] + (u64)bytes > limit) partial |= (u64)1 << l;
  if (!check_lanes(w, i, x.addr, x.exec & ~partial, bytes, 0) || (partial && !check_lanes(w, i, x.addr, partial, 4, 0))) return;
  for (int l = 0; l < LANES; l++) {
    if (!(all >> l & 1)) continue;
    for (int k = 0; k < words; k++) {
      int in = x.exec >> l & 1 && (i->idxen || (u64)offset[l] + 4 * k + piece <= limit);
      out[k][l] = in ? raw(x.addr[l] + 4 * k, piece) : 0;
    }
  }
  if (i->lds) {
    u32 base = w->s[SG_M0] + (u32)i->imm;
    for (int l = 0; l < LANES; l++) {
      if (!(all >> l & 1)) continue;
      u32 width = (u32)(bytes < 4 ? 4 : bytes), at = base + (u32)l * width;
      u8 *q = lds_at(w, i, at, l, (int)width);
      if (!q) return;
      if (w->chk) check_lds(w, i, at, (int)width, 1, 1);
      for (int k = 0; k < words; k++) memcpy(q + 4 * k, &out[k][l], 4);
    }
    w->launch->traffic.dma_bytes += (u64)bytes * (u64)__builtin_popcountll(all);
  } else {
    for (int k = 0; k < words; k++) {
      u32 *d = w->v[i->dst.idx + k];
      for (int l = 0; l < LANES; l++) if (all >> l & 1) { if (piece == 4) d[l] = out[k][l]; else put_small(&d[l], out[k][l], piece, ext); }
    }
  }
  count_traffic(w, i, x.addr, x.exec, bytes, 0);
  if (x.exec) { int f = __builtin_ctzll(x.exec); note_poll(w, i, x.addr[f], out[0][f]); }
  if (w->chk) {
    for (int l = 0; l < LANES; l++) if ((x.exec & ~partial) >> l & 1) check_global(w, i, x.addr[l], bytes, 0, 0, i->scope);
    check_issue(w, i, i->lds ? CNT_VM | CNT_LDS_DMA : CNT_VM, 0);
  }
}
static void buffer_store(Wave *w, const Inst *i, int bytes, int high) {
  Lanes x;
  u32 offset[LANES];
  u64 limit;
  int words = bytes > 4 ? bytes / 4 : 1, piece = bytes < 4 ? bytes : 4;
  buffer_addresses(w, i, bytes, &x, offset, &limit);
  u64 partial = 0;
  for (int l = 0; l < LANES; l++) if (x.exec >> l & 1 && !i->idxen && (u64)offset[l] + (u64)bytes > limit) partial |= (u64)1 << l;
  if (!check_lanes(w, i, x.addr, x.exec & ~partial, bytes, 1) || (partial && !check_lanes(w, i, x.addr, partial, 4, 1))) return;
  for (int l = 0; l < LANES; l++) {
    if (!(x.exec >> l & 1)) continue;
    for (int k = 0; k < words; k++) {
      if (!i->idxen && (u64)offset[l] + 4 * k + piece > limit) continue;
      if (w->chk) check_global(w, i, x.addr[l] + 4 * k, piece, 1, 0, i->scope);
      u32 v = w->v[i->src[3].idx + k][l];
      raw_store(x.addr[l] + 4 * k, piece, high ? v >> 16 : v);
    }
  }
  count_traffic(w, i, x.addr, x.exec, bytes, 1);
  if (x.exec) note_progress(w);
  if (w->chk) check_issue(w, i, CNT_VM, 1);
}
static void buffer_atomic(Wave *w, const Inst *i, Step32 f32, Step64 f64) {
  Lanes x;
  u32 offset[LANES];
  u64 limit;
  buffer_addresses(w, i, f64 ? 8 : 4, &x, offset, &limit);
  atomic_lanes(w, i, x.addr, x.exec, i->src[3].idx, f32, f64, 0);
}
static void load_lds(Wave *w, const Inst *i, int bytes, int ext) {
  Lanes x;
  if (!addresses(w, i, SEG_GLOBAL, &x) || !check_lanes(w, i, x.addr, x.exec, bytes, 0)) return;
  u32 width = (u32)(bytes < 4 ? 4 : bytes), base = w->s[SG_M0] + (u32)i->imm;
  for (int l = 0; l < LANES; l++) {
    if (!(x.exec >> l & 1)) continue;
    u32 at = base + (u32)l * width, v = 0;
    u8 *q = lds_at(w, i, at, l, (int)width);
    if (!q) return;
    if (w->chk) { check_lds(w, i, at, (int)width, 1, 1); check_global(w, i, x.addr[l], bytes, 0, 0, i->scope); }
    if (bytes < 4) { put_small(&v, raw(x.addr[l], bytes), bytes, ext); memcpy(q, &v, 4); }
    else for (int k = 0; k < bytes / 4; k++) { v = raw(x.addr[l] + 4 * k, 4); memcpy(q + 4 * k, &v, 4); }
  }
  w->launch->traffic.dma_bytes += (u64)bytes * (u64)__builtin_popcountll(x.exec);
  count_traffic(w, i, x.addr, x.exec, bytes, 0);
  if (w->chk) check_issue(w, i, CNT_VM | CNT_LDS_DMA, 0);
}
static void op_buffer_wbl2(Wave *w, const Inst *i) { if (w->chk) { check_fence(w, i, 1, i->scope); check_issue(w, i, CNT_VM | CNT_FENCE_REL, 1); } }
static void op_buffer_inv(Wave *w, const Inst *i) { if (w->chk) { check_fence(w, i, 0, i->scope); check_issue(w, i, CNT_VM | CNT_FENCE_ACQ, 0); } }

#define LOAD_LIST(X) X(ubyte, 1, EXT_NONE) X(sbyte, 1, EXT_SIGNED) X(ushort, 2, EXT_NONE) X(sshort, 2, EXT_SIGNED) X(dword, 4, EXT_NONE) X(dwordx2, 8, EXT_NONE) \
  X(dwordx3, 12, EXT_NONE) X(dwordx4, 16, EXT_NONE) X(ubyte_d16, 1, EXT_D16) X(ubyte_d16_hi, 1, EXT_D16_HI) X(sbyte_d16, 1, EXT_D16_S) X(sbyte_d16_hi, 1, EXT_D16_HI_S) \
  X(short_d16, 2, EXT_D16) X(short_d16_hi, 2, EXT_D16_HI)
#define STORE_LIST(X) X(byte, 1, 0) X(byte_d16_hi, 1, 1) X(short, 2, 0) X(short_d16_hi, 2, 1) X(dword, 4, 0) X(dwordx2, 8, 0) X(dwordx3, 12, 0) X(dwordx4, 16, 0)
#define LDS_LIST(X) X(ubyte, 1, EXT_NONE) X(sbyte, 1, EXT_SIGNED) X(ushort, 2, EXT_NONE) X(sshort, 2, EXT_SIGNED) X(dword, 4, EXT_NONE) X(dwordx3, 12, EXT_NONE) X(dwordx4, 16, EXT_NONE)
#define DEF_LOADS(n, b, e) \
  static void op_flat_load_##n(Wave *w, const Inst *i) { load(w, i, SEG_FLAT, b, e); } \
  static void op_global_load_##n(Wave *w, const Inst *i) { load(w, i, SEG_GLOBAL, b, e); } \
  static void op_scratch_load_##n(Wave *w, const Inst *i) { load(w, i, SEG_SCRATCH, b, e); } \
  static void op_buffer_load_##n(Wave *w, const Inst *i) { buffer_load(w, i, b, e); }
LOAD_LIST(DEF_LOADS)
#define DEF_STORES(n, b, h) \
  static void op_flat_store_##n(Wave *w, const Inst *i) { store(w, i, SEG_FLAT, b, h); } \
  static void op_global_store_##n(Wave *w, const Inst *i) { store(w, i, SEG_GLOBAL, b, h); } \
  static void op_scratch_store_##n(Wave *w, const Inst *i) { store(w, i, SEG_SCRATCH, b, h); } \
  static void op_buffer_store_##n(Wave *w, const Inst *i) { buffer_store(w, i, b, h); }
STORE_LIST(DEF_STORES)
#define DEF_LDS(n, b, e) static void op_global_load_lds_##n(Wave *w, const Inst *i) { load_lds(w, i, b, e); }
LDS_LIST(DEF_LDS)
#define DEF_ATOMICS(n, a, b) \
  static void op_flat_atomic_##n(Wave *w, const Inst *i) { atomic_flat(w, i, SEG_FLAT, a, b); } \
  static void op_global_atomic_##n(Wave *w, const Inst *i) { atomic_flat(w, i, SEG_GLOBAL, a, b); } \
  static void op_buffer_atomic_##n(Wave *w, const Inst *i) { buffer_atomic(w, i, a, b); }
#define DEF_ATOMICS32(n, e) DEF_ATOMICS(n, step_##n, 0)
#define DEF_ATOMICS64(n, e) DEF_ATOMICS(n, 0, step_##n)
ATOMIC32_LIST(DEF_ATOMICS32)
ATOMIC64_LIST(DEF_ATOMICS64)

#define E_LOADS(n, b, e) ENTRY(flat_load_##n) ENTRY(global_load_##n) ENTRY(scratch_load_##n) ENTRY(buffer_load_##n)
#define E_STORES(n, b, h) ENTRY(flat_store_##n) ENTRY(global_store_##n) ENTRY(scratch_store_##n) ENTRY(buffer_store_##n)
#define E_LDS(n, b, e) ENTRY(global_load_lds_##n)
#define E_ATOMICS(n, e) ENTRY(flat_atomic_##n) ENTRY(global_atomic_##n) ENTRY(buffer_atomic_##n)
const OpEntry vmem_ops[] = {LOAD_LIST(E_LOADS) STORE_LIST(E_STORES) LDS_LIST(E_LDS) ATOMIC32_LIST(E_ATOMICS) ATOMIC64_LIST(E_ATOMICS)
  ENTRY(buffer_wbl2) ENTRY(buffer_inv) {0, 0}};
