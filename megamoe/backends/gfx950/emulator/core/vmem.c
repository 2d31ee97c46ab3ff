/* FLAT, GLOBAL and SCRATCH loads and stores, loads into LDS, cache control.
 *
 * An address above 2^48 in a FLAT instruction is an aperture: LDS or scratch. A detector sees a store before memory does
 * and a load after it, so that a flag's history is there when its value is. */
#include "vmem.h"

#define LDS_APERTURE 0x0001000000000000ull
#define SCRATCH_APERTURE 0x0002000000000000ull

static int find_addresses(Wave *w, const Inst *i, int segment, Lanes *x) {
  x->exec = exec_of(w);
  x->lds = x->scratch = x->dropped = x->partial = 0;
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
int aligned_lanes(Wave *w, const Inst *i, const Lanes *x, int bytes) {
  int l;
  FOR_ACTIVE(l, x->exec | x->lds | x->scratch)
    if (x->addr[l] % (u64)bytes) { fault(w, i, FAULT_MEMORY, x->addr[l], l, "atomic at %#llx is not aligned to %d bytes", (unsigned long long)x->addr[l], bytes); return 0; }
  return 1;
}
/* Fill `x`; 0 after a fault. LDS lanes are shown to the detector here; `write` 2 is an atomic. */
int lane_addresses(Wave *w, const Inst *i, int segment, int bytes, int write, Lanes *x) {
  int l;
  if (!find_addresses(w, i, segment, x) || (write == 2 && !aligned_lanes(w, i, x, bytes)) || !check_lanes(w, i, x->addr, x->exec, bytes, write != 0)) return 0;
  memcpy(x->host, x->addr, sizeof x->host);
  if (x->lds) {
    u32 at[LANES];
    FOR_ACTIVE(l, x->lds) at[l] = (u32)x->addr[l];
    u8 *lds = lds_lanes(w, i, at, x->lds, bytes, write);
    if (!lds) return 0;
    FOR_ACTIVE(l, x->lds) x->host[l] = (u64)(uintptr_t)(lds + at[l]);
  }
  FOR_ACTIVE(l, x->scratch) {
    void *p = scratch_at(w, i, (u32)x->addr[l], l, bytes);
    if (!p) return 0;
    x->host[l] = (u64)(uintptr_t)p;
  }
  return 1;
}

static void load(Wave *w, const Inst *i, int segment, int bytes, int ext) {
  Lanes x;
  u32 out[4][LANES];
  int words = bytes > 4 ? bytes / 4 : 1, piece = bytes < 4 ? bytes : 4, l;
  if (!lane_addresses(w, i, segment, bytes, 0, &x)) return;
  u64 all = x.exec | x.lds | x.scratch;
  if (bytes == 16) FOR_ACTIVE(l, all) for (int k = 0; k < 4; k++) out[k][l] = raw(x.host[l] + 4 * k, 4);
  else if (bytes == 4) FOR_ACTIVE(l, all) out[0][l] = raw(x.host[l], 4);
  else if (bytes < 4) { const u32 *d = w->v[i->dst.idx]; FOR_ACTIVE(l, all) out[0][l] = extended(d[l], raw(x.host[l], piece), piece, ext); }
  else FOR_ACTIVE(l, all) for (int k = 0; k < words; k++) out[k][l] = raw(x.host[l] + 4 * k, 4);
  for (int k = 0; k < words; k++) merge_row(w, w->v[i->dst.idx + k], out[k]);
  if (x.exec) {
    int first = __builtin_ctzll(x.exec);
    count_traffic(w, i, x.addr, x.exec, bytes, 0);
    note_poll(w, i, x.addr[first], out[0][first]);
  }
  if (w->chk) {
    if (x.exec) check_global(w, i, x.addr, x.exec, bytes, 0, 0, i->scope);
    check_issue(w, i, segment == SEG_FLAT ? CNT_VM | CNT_LGKM : CNT_VM, 0);
  }
}
static void store(Wave *w, const Inst *i, int segment, int bytes, int high) {
  Lanes x;
  int words = bytes > 4 ? bytes / 4 : 1, piece = bytes < 4 ? bytes : 4, l;
  if (!lane_addresses(w, i, segment, bytes, 1, &x)) return;
  u32 (*v)[LANES] = &w->v[i->src[1].idx];
  if (w->chk && x.exec) check_global(w, i, x.addr, x.exec, bytes, 1, 0, i->scope);
  if (bytes == 8) FOR_ACTIVE(l, x.exec | x.lds | x.scratch) { /* whole: a flag and its payload may share the eight bytes */
    u64 both = v[0][l] | (u64)v[1][l] << 32;
    if (x.host[l] % 8) memcpy((void *)(uintptr_t)x.host[l], &both, 8);
    else __atomic_store_n((u64 *)(uintptr_t)x.host[l], both, __ATOMIC_RELAXED);
  }
  else FOR_ACTIVE(l, x.exec | x.lds | x.scratch)
    for (int k = 0; k < words; k++) raw_store(x.host[l] + 4 * k, piece, high ? v[k][l] >> 16 : v[k][l]);
  count_traffic(w, i, x.addr, x.exec, bytes, 1);
  if (x.exec | x.lds) note_progress(w);
  if (w->chk) check_issue(w, i, segment == SEG_FLAT ? CNT_VM | CNT_LGKM : CNT_VM, 1);
}
/* Lane k's value goes to LDS at M0 + offset + k * width, whatever lanes are active. */
static void load_lds(Wave *w, const Inst *i, int segment, int bytes, int ext) {
  Lanes x;
  if (!lane_addresses(w, i, segment, bytes, 0, &x)) return;
  u32 width = (u32)(bytes < 4 ? 4 : bytes), at[LANES];
  u64 all = x.exec | x.scratch;
  int l;
  for (l = 0; l < LANES; l++) at[l] = w->s[SG_M0] + (u32)i->imm + (u32)l * width;
  u8 *lds = lds_lanes(w, i, at, all, (int)width, LDS_LOADED);
  if (!lds) return;
  FOR_ACTIVE(l, all)
    for (u32 k = 0; k < width; k += 4) { u32 v = bytes < 4 ? extended(0, raw(x.host[l], bytes), bytes, ext) : raw(x.host[l] + k, 4); memcpy(lds + at[l] + k, &v, 4); }
  w->launch->traffic->dma_bytes += (u64)bytes * (u64)__builtin_popcountll(all);
  count_traffic(w, i, x.addr, x.exec, bytes, 0);
  if (w->chk) {
    if (x.exec) check_global(w, i, x.addr, x.exec, bytes, 0, 0, i->scope);
    check_issue(w, i, CNT_VM | CNT_LDS_DMA, 0);
  }
}
static void op_buffer_wbl2(Wave *w, const Inst *i) { if (w->chk) { check_fence(w, i, 1, i->scope); check_issue(w, i, CNT_VM | CNT_FENCE_REL, 1); } }
static void op_buffer_inv(Wave *w, const Inst *i) { if (w->chk) { check_fence(w, i, 0, i->scope); check_issue(w, i, CNT_VM | CNT_FENCE_ACQ, 0); } }

#define LOAD_LIST(X) X(ubyte, 1, EXT_NONE) X(sbyte, 1, EXT_SIGNED) X(ushort, 2, EXT_NONE) X(sshort, 2, EXT_SIGNED) X(dword, 4, EXT_NONE) X(dwordx2, 8, EXT_NONE) \
  X(dwordx3, 12, EXT_NONE) X(dwordx4, 16, EXT_NONE) X(ubyte_d16, 1, EXT_D16) X(ubyte_d16_hi, 1, EXT_D16_HI) X(sbyte_d16, 1, EXT_D16_S) X(sbyte_d16_hi, 1, EXT_D16_HI_S) \
  X(short_d16, 2, EXT_D16) X(short_d16_hi, 2, EXT_D16_HI)
#define STORE_LIST(X) X(byte, 1, 0) X(byte_d16_hi, 1, 1) X(short, 2, 0) X(short_d16_hi, 2, 1) X(dword, 4, 0) X(dwordx2, 8, 0) X(dwordx3, 12, 0) X(dwordx4, 16, 0)
#define LDS_LIST(X) X(ubyte, 1, EXT_NONE) X(sbyte, 1, EXT_SIGNED) X(ushort, 2, EXT_NONE) X(sshort, 2, EXT_SIGNED) X(dword, 4, EXT_NONE) X(dwordx3, 12, EXT_NONE) X(dwordx4, 16, EXT_NONE)
#define LOCKED(call) { race_enter(w); call; race_leave(w); }
#define DEF_LOADS(n, b, e) \
  static void op_flat_load_##n(Wave *w, const Inst *i) LOCKED(load(w, i, SEG_FLAT, b, e)) \
  static void op_global_load_##n(Wave *w, const Inst *i) LOCKED(load(w, i, SEG_GLOBAL, b, e)) \
  static void op_scratch_load_##n(Wave *w, const Inst *i) { load(w, i, SEG_SCRATCH, b, e); }
LOAD_LIST(DEF_LOADS)
#define DEF_STORES(n, b, h) \
  static void op_flat_store_##n(Wave *w, const Inst *i) LOCKED(store(w, i, SEG_FLAT, b, h)) \
  static void op_global_store_##n(Wave *w, const Inst *i) LOCKED(store(w, i, SEG_GLOBAL, b, h)) \
  static void op_scratch_store_##n(Wave *w, const Inst *i) { store(w, i, SEG_SCRATCH, b, h); }
STORE_LIST(DEF_STORES)
#define DEF_LDS(n, b, e) \
  static void op_global_load_lds_##n(Wave *w, const Inst *i) LOCKED(load_lds(w, i, SEG_GLOBAL, b, e)) \
  static void op_scratch_load_lds_##n(Wave *w, const Inst *i) { load_lds(w, i, SEG_SCRATCH, b, e); }
LDS_LIST(DEF_LDS)

#define E_LOADS(n, b, e) ENTRY(flat_load_##n) ENTRY(global_load_##n) ENTRY(scratch_load_##n)
#define E_STORES(n, b, h) ENTRY(flat_store_##n) ENTRY(global_store_##n) ENTRY(scratch_store_##n)
#define E_LDS(n, b, e) ENTRY(global_load_lds_##n) ENTRY(scratch_load_lds_##n)
const OpEntry vmem_ops[] = {LOAD_LIST(E_LOADS) STORE_LIST(E_STORES) LDS_LIST(E_LDS) ENTRY(buffer_wbl2) ENTRY(buffer_inv) {0, 0}};
