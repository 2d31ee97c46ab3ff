/* Atomics of FLAT, GLOBAL and MUBUF: one read-modify-write a lane, in lane order. */
#include "vmem.h"

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


/* `x` holds checked lanes; `vdata` is the row of the operand, after it that of the comparison. */
static void atomic_lanes(Wave *w, const Inst *i, Lanes *x, int vdata, Step32 f32, Step64 f64, int counters) {
  int bytes = f64 ? 8 : 4, l, changed = 0;
  u64 all = x->exec | x->lds | x->scratch;
  u32 keep[2][LANES];
  if (w->chk && x->exec) check_global(w, i, x->addr, x->exec, bytes, 1, 1, i->scope);
  FOR_ACTIVE(l, all) {
    if (f32) {
      u32 *p = (u32 *)(uintptr_t)x->host[l], d = w->v[vdata][l], cmp = f32 == step_cmpswap ? w->v[vdata + 1][l] : 0, o = __atomic_load_n(p, __ATOMIC_SEQ_CST), n;
      do n = f32(o, d, cmp); while (!__atomic_compare_exchange_n(p, &o, n, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
      keep[0][l] = o;
      changed |= o != n;
    } else {
      u64 *p = (u64 *)(uintptr_t)x->host[l], d = w->v[vdata][l] | (u64)w->v[vdata + 1][l] << 32, o = __atomic_load_n(p, __ATOMIC_SEQ_CST), n;
      u64 cmp = f64 == step_cmpswap_x2 ? w->v[vdata + 2][l] | (u64)w->v[vdata + 3][l] << 32 : 0;
      do n = f64(o, d, cmp); while (!__atomic_compare_exchange_n(p, &o, n, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
      keep[0][l] = (u32)o;
      keep[1][l] = (u32)(o >> 32);
      changed |= o != n;
    }
  }
  if (i->dst.kind == K_VGPR)
    for (int k = 0; k < bytes / 4; k++) { u32 *d = w->v[i->dst.idx + k]; FOR_ACTIVE(l, all) d[l] = keep[k][l]; FOR_ACTIVE(l, x->dropped) d[l] = 0; }
  count_traffic(w, i, x->addr, x->exec, bytes, 2);
  if (x->exec) { l = __builtin_ctzll(x->exec); note_poll(w, i, x->addr[l], keep[0][l]); }
  if (changed) note_progress(w);
  if (w->chk) check_issue(w, i, counters, 1);
}
static void atomic_flat(Wave *w, const Inst *i, int segment, Step32 f32, Step64 f64) {
  Lanes x;
  race_enter(w);
  if (lane_addresses(w, i, segment, f64 ? 8 : 4, 2, &x)) atomic_lanes(w, i, &x, i->src[1].idx, f32, f64, segment == SEG_FLAT ? CNT_VM | CNT_LGKM : CNT_VM);
  race_leave(w);
}
static void buffer_atomic(Wave *w, const Inst *i, Step32 f32, Step64 f64) {
  Lanes x;
  u32 offset[LANES];
  u64 limit;
  int bytes = f64 ? 8 : 4;
  race_enter(w);
  buffer_addresses(w, i, bytes, &x, offset, &limit);
  memcpy(x.host, x.addr, sizeof x.host);
  if (aligned_lanes(w, i, &x, bytes) && check_lanes(w, i, x.addr, x.exec, bytes, 1)) atomic_lanes(w, i, &x, i->src[3].idx, f32, f64, CNT_VM);
  race_leave(w);
}
#define DEF_ATOMICS(n, a, b) \
  static void op_flat_atomic_##n(Wave *w, const Inst *i) { atomic_flat(w, i, SEG_FLAT, a, b); } \
  static void op_global_atomic_##n(Wave *w, const Inst *i) { atomic_flat(w, i, SEG_GLOBAL, a, b); } \
  static void op_buffer_atomic_##n(Wave *w, const Inst *i) { buffer_atomic(w, i, a, b); }
#define DEF_ATOMICS32(n, e) DEF_ATOMICS(n, step_##n, 0)
#define DEF_ATOMICS64(n, e) DEF_ATOMICS(n, 0, step_##n)
ATOMIC32_LIST(DEF_ATOMICS32)
ATOMIC64_LIST(DEF_ATOMICS64)

#define E_ATOMICS(n, e) ENTRY(flat_atomic_##n) ENTRY(global_atomic_##n) ENTRY(buffer_atomic_##n)
const OpEntry atomic_ops[] = {ATOMIC32_LIST(E_ATOMICS) ATOMIC64_LIST(E_ATOMICS) {0, 0}};
