/* LDS instructions: reads, writes, transposing reads, atomics, and the lane permutes that go through the LDS unit. */
#include "vmem.h"

/* Base of the workgroup's LDS when every lane of `exec` is inside of it, 0 after a fault; shows the access to the detector. */
u8 *lds_lanes(Wave *w, const Inst *i, const u32 *address, u64 exec, int bytes, int use) {
  u32 size = w->group->lds_bytes;
  int l;
  FOR_ACTIVE(l, exec)
    if ((u64)address[l] + (u64)bytes > size) {
      fault(w, i, FAULT_LDS, address[l], l, "LDS %s of %d bytes at %u is outside of the %u bytes of the workgroup", use ? "write" : "read", bytes, address[l], size);
      return 0;
    }
  if (w->chk) check_lds(w, i, address, exec, bytes, use == LDS_LOADED ? 1 : use, use == LDS_LOADED);
  return w->group->lds;
}
static void done(Wave *w, const Inst *i, int write, u64 bytes) {
  w->launch->traffic->lds_bytes[write] += bytes * (u64)__builtin_popcountll(exec_of(w));
  if (write) note_progress(w);
  if (w->chk) check_issue(w, i, CNT_LGKM, write);
}
static void lane_offsets(Wave *w, const Inst *i, u32 offset, u32 *out) {
  const u32 *addr = w->v[i->src[0].idx];
  for (int l = 0; l < LANES; l++) out[l] = addr[l] + offset;
}
#define BY_SIZE(bytes, copy) switch (bytes) { case 1: copy(1) break; case 2: copy(2) break; case 4: copy(4) break; case 8: copy(8) break; case 12: copy(12) break; default: copy(16) }
static inline int read_lanes(Wave *w, const Inst *i, u32 offset, int bytes, u32 (*out)[LANES]) {
  u32 at[LANES];
  u64 e = exec_of(w);
  int l;
  lane_offsets(w, i, offset, at);
  u8 *lds = lds_lanes(w, i, at, e, bytes, LDS_READ);
  if (!lds) return 0;
#define READ(n) FOR_ACTIVE(l, e) { u32 x[4] = {0}; memcpy(x, lds + at[l], n); for (int k = 0; k < (n + 3) / 4; k++) out[k][l] = x[k]; }
  BY_SIZE(bytes, READ)
  return 1;
}
static inline int write_lanes(Wave *w, const Inst *i, u32 offset, int bytes, int data, int shift) {
  u32 at[LANES], (*v)[LANES] = &w->v[i->src[data].idx];
  u64 e = exec_of(w);
  int l;
  lane_offsets(w, i, offset, at);
  u8 *lds = lds_lanes(w, i, at, e, bytes, LDS_WRITE);
  if (!lds) return 0;
#define WRITE(n) FOR_ACTIVE(l, e) { u32 x[4]; for (int k = 0; k < (n + 3) / 4; k++) x[k] = v[k][l] >> shift; memcpy(lds + at[l], x, n); }
  BY_SIZE(bytes, WRITE)
  return 1;
}
static void keep(Wave *w, const Inst *i, u32 (*out)[LANES], int first, int words) {
  for (int k = 0; k < words; k++) merge_row(w, w->v[i->dst.idx + first + k], out[k]);
}

#define READ_LIST(X) X(ds_read_b32, 4) X(ds_read_b64, 8) X(ds_read_b96, 12) X(ds_read_b128, 16)
#define DEF_READ(name, b) static void op_##name(Wave *w, const Inst *i) { u32 out[4][LANES]; \
  if (read_lanes(w, i, (u32)i->imm, b, out)) { keep(w, i, out, 0, b / 4); done(w, i, 0, b); } }
READ_LIST(DEF_READ)
#define SMALL_LIST(X) X(ds_read_u8, 1, x & 255) X(ds_read_i8, 1, (u32)(i32)(int8_t)x) X(ds_read_u16, 2, x & 0xffff) X(ds_read_i16, 2, (u32)(i32)(int16_t)x) \
  X(ds_read_u8_d16, 1, (d & 0xffff0000u) | (x & 255)) X(ds_read_u8_d16_hi, 1, (d & 0xffff) | (x & 255) << 16) \
  X(ds_read_i8_d16, 1, (d & 0xffff0000u) | ((u32)(i32)(int8_t)x & 0xffff)) X(ds_read_i8_d16_hi, 1, (d & 0xffff) | (u32)(i32)(int8_t)x << 16) \
  X(ds_read_u16_d16, 2, (d & 0xffff0000u) | (x & 0xffff)) X(ds_read_u16_d16_hi, 2, (d & 0xffff) | x << 16)
#define DEF_SMALL(name, b, e) static void op_##name(Wave *w, const Inst *i) { u32 out[4][LANES]; if (!read_lanes(w, i, (u32)i->imm, b, out)) return; \
  u32 *D = w->v[i->dst.idx]; u64 ex = exec_of(w); for (int l = 0; l < LANES; l++) if (ex >> l & 1) { u32 x = out[0][l], d = D[l]; (void)d; D[l] = (e); } done(w, i, 0, b); }
SMALL_LIST(DEF_SMALL)
#define READ2_LIST(X) X(ds_read2_b32, 4, 4) X(ds_read2_b64, 8, 8) X(ds_read2st64_b32, 4, 256) X(ds_read2st64_b64, 8, 512)
#define DEF_READ2(name, b, unit) static void op_##name(Wave *w, const Inst *i) { u32 x[4][LANES], y[4][LANES]; \
  if (read_lanes(w, i, (u32)i->imm * unit, b, x) && read_lanes(w, i, (u32)i->imm1 * unit, b, y)) { keep(w, i, x, 0, b / 4); keep(w, i, y, b / 4, b / 4); done(w, i, 0, 2 * b); } }
READ2_LIST(DEF_READ2)
#define WRITE_LIST(X) X(ds_write_b8, 1, 0) X(ds_write_b16, 2, 0) X(ds_write_b8_d16_hi, 1, 16) X(ds_write_b16_d16_hi, 2, 16) X(ds_write_b32, 4, 0) \
  X(ds_write_b64, 8, 0) X(ds_write_b96, 12, 0) X(ds_write_b128, 16, 0)
#define DEF_WRITE(name, b, shift) static void op_##name(Wave *w, const Inst *i) { if (write_lanes(w, i, (u32)i->imm, b, 1, shift)) done(w, i, 1, b); }
WRITE_LIST(DEF_WRITE)
#define WRITE2_LIST(X) X(ds_write2_b32, 4, 4) X(ds_write2_b64, 8, 8) X(ds_write2st64_b32, 4, 256) X(ds_write2st64_b64, 8, 512)
#define DEF_WRITE2(name, b, unit) static void op_##name(Wave *w, const Inst *i) { \
  if (write_lanes(w, i, (u32)i->imm * unit, b, 1, 0) && write_lanes(w, i, (u32)i->imm1 * unit, b, 2, 0)) done(w, i, 1, 2 * b); }
WRITE2_LIST(DEF_WRITE2)

/* Transposing reads: sixteen lanes hold the rows of a matrix of depth x 16 elements; lane n leaves with column n. */
static void transpose(Wave *w, const Inst *i, int bits, int bytes) {
  u32 in[4][LANES], out[4][LANES];
  int depth = 8 * bytes / bits, lanes_per_row = 16 / depth, each = depth;
  if (exec_of(w) != ~(u64)0) { fault(w, i, FAULT_UNIMPLEMENTED, 0, -1, "transposing read with inactive lanes"); return; }
  if (!read_lanes(w, i, (u32)i->imm, bytes, in)) return;
  memset(out, 0, sizeof out);
  for (int l = 0; l < LANES; l++)
    for (int k = 0; k < depth; k++) {
      int n = l & 15, from = (l & ~15) + k * lanes_per_row + n / each, bit = n % each * bits, to = k * bits;
      u64 x = in[bit / 32][from];
      if (bit % 32 + bits > 32) x |= (u64)in[bit / 32 + 1][from] << 32;
      u64 v = (x >> bit % 32 & (((u64)1 << bits) - 1)) << to % 32;
      out[to / 32][l] |= (u32)v;
      if (to % 32 + bits > 32) out[to / 32 + 1][l] |= (u32)(v >> 32);
    }
  keep(w, i, out, 0, bytes / 4);
  done(w, i, 0, bytes);
}
#define TR_LIST(X) X(ds_read_b64_tr_b16, 16, 8) X(ds_read_b64_tr_b8, 8, 8) X(ds_read_b64_tr_b4, 4, 8) X(ds_read_b96_tr_b6, 6, 12)
#define DEF_TR(name, bits, bytes) static void op_##name(Wave *w, const Inst *i) { transpose(w, i, bits, bytes); }
TR_LIST(DEF_TR)

static void op_ds_bpermute_b32(Wave *w, const Inst *i) {
  u32 out[1][LANES];
  u64 e = exec_of(w);
  for (int l = 0; l < LANES; l++) { int k = (w->v[i->src[0].idx][l] + (u32)i->imm) >> 2 & 63; out[0][l] = e >> k & 1 ? w->v[i->src[1].idx][k] : 0; }
  keep(w, i, out, 0, 1);
  if (w->chk) check_issue(w, i, CNT_LGKM, 0);
}
static void op_ds_permute_b32(Wave *w, const Inst *i) {
  u32 out[1][LANES] = {{0}};
  u64 e = exec_of(w);
  for (int l = 0; l < LANES; l++) if (e >> l & 1) out[0][(w->v[i->src[0].idx][l] + (u32)i->imm) >> 2 & 63] = w->v[i->src[1].idx][l];
  keep(w, i, out, 0, 1);
  if (w->chk) check_issue(w, i, CNT_LGKM, 0);
}
static void op_ds_swizzle_b32(Wave *w, const Inst *i) {
  u32 out[1][LANES], o = (u32)i->imm;
  u64 e = exec_of(w);
  for (int l = 0; l < LANES; l++) {
    int k = o & 0x8000 ? (l & ~3) | (int)(o >> 2 * (l & 3) & 3) : (l & 32) | (int)((((u32)(l & 31) & (o & 31)) | (o >> 5 & 31)) ^ (o >> 10 & 31));
    out[0][l] = e >> k & 1 ? w->v[i->src[0].idx][k] : 0;
  }
  keep(w, i, out, 0, 1);
  if (w->chk) check_issue(w, i, CNT_LGKM, 0);
}
static void op_ds_nop(Wave *w, const Inst *i) { (void)w; (void)i; }

/* Atomics of an LDS word or pair; `d` data, `c` the second data operand (compare: d is compared, c written). */
typedef u64 (*Step)(u64 o, u64 d, u64 c);
#define ORDERED32(X) X(add_u32, o + d) X(sub_u32, o - d) X(rsub_u32, d - o) X(inc_u32, o >= d ? 0 : o + 1) X(dec_u32, o == 0 || o > d ? d : o - 1) \
  X(min_i32, (i32)o < (i32)d ? o : d) X(max_i32, (i32)o > (i32)d ? o : d) X(min_u32, o < d ? o : d) X(max_u32, o > d ? o : d) X(and_b32, o & d) X(or_b32, o | d) X(xor_b32, o ^ d) \
  X(mskor_b32, (o & ~d) | c) X(min_f32, as_u(fminf(as_f((u32)o), as_f((u32)d)))) X(max_f32, as_u(fmaxf(as_f((u32)o), as_f((u32)d)))) \
  X(add_f32, as_u(as_f((u32)o) + as_f((u32)d))) X(cmpst_b32, o == d ? c : o) X(cmpst_f32, as_f((u32)o) == as_f((u32)d) ? c : o)
#define ORDERED64(X) X(add_u64, o + d) X(sub_u64, o - d) X(rsub_u64, d - o) X(inc_u64, o >= d ? 0 : o + 1) X(dec_u64, o == 0 || o > d ? d : o - 1) \
  X(min_i64, (i64)o < (i64)d ? o : d) X(max_i64, (i64)o > (i64)d ? o : d) X(min_u64, o < d ? o : d) X(max_u64, o > d ? o : d) X(and_b64, o & d) X(or_b64, o | d) X(xor_b64, o ^ d) \
  X(mskor_b64, (o & ~d) | c) X(min_f64, as_q(fmin(as_d(o), as_d(d)))) X(max_f64, as_q(fmax(as_d(o), as_d(d)))) X(add_f64, as_q(as_d(o) + as_d(d))) \
  X(cmpst_b64, o == d ? c : o) X(cmpst_f64, as_d(o) == as_d(d) ? c : o)
#define DEF_STEP(n, e) static u64 step_##n(u64 o, u64 d, u64 c) { (void)o; (void)d; (void)c; return (e); }
ORDERED32(DEF_STEP) ORDERED64(DEF_STEP)
static u64 step_wrxchg(u64 o, u64 d, u64 c) { (void)o; (void)c; return d; }
static void atomic(Wave *w, const Inst *i, Step step, int bytes) {
  u32 out[2][LANES], at[LANES];
  u64 e = exec_of(w);
  int l;
  lane_offsets(w, i, (u32)i->imm, at);
  u8 *lds = lds_lanes(w, i, at, e, bytes, LDS_ATOMIC);
  if (!lds) return;
  FOR_ACTIVE(l, e) {
    u8 *p = lds + at[l];
    u64 o = 0, d = 0, c = 0, n;
    memcpy(&o, p, bytes);
    for (int k = 0; k < bytes / 4; k++) {
      d |= (u64)w->v[i->src[1].idx + k][l] << 32 * k;
      if (i->nsrc > 2) c |= (u64)w->v[i->src[2].idx + k][l] << 32 * k;
    }
    n = step(o, d, c);
    memcpy(p, &n, bytes);
    out[0][l] = (u32)o;
    out[1][l] = (u32)(o >> 32);
  }
  if (i->dst.kind == K_VGPR) keep(w, i, out, 0, bytes / 4);
  done(w, i, 1, bytes);
}
static u64 step_pk_f16(u64 o, u64 d, u64 c) {
  (void)c;
  return f_to_half(half_to_f(o & 0xffff) + half_to_f(d & 0xffff)) | f_to_half(half_to_f((u32)o >> 16) + half_to_f((u32)d >> 16)) << 16;
}
static u64 step_pk_bf16(u64 o, u64 d, u64 c) {
  (void)c;
  return bf16_of(as_f((u32)o << 16) + as_f((u32)d << 16)) | (u32)bf16_of(as_f((u32)o & 0xffff0000u) + as_f((u32)d & 0xffff0000u)) << 16;
}
/* One word a wave: the number of active lanes is added or taken away, every lane gets the old value. M0 has the base. */
static void counter(Wave *w, const Inst *i, int sign) {
  u32 at[LANES], out[1][LANES], old;
  u64 e = exec_of(w), one = e & -e;
  if (!e) return;
  for (int l = 0; l < LANES; l++) at[l] = (w->s[SG_M0] & 0xffff) + (u32)i->imm;
  u8 *lds = lds_lanes(w, i, at, one, 4, LDS_ATOMIC);
  if (!lds) return;
  memcpy(&old, lds + at[0], 4);
  u32 new = old + (u32)(sign * __builtin_popcountll(e));
  memcpy(lds + at[0], &new, 4);
  for (int l = 0; l < LANES; l++) out[0][l] = old;
  keep(w, i, out, 0, 1);
  w->launch->traffic->lds_bytes[1] += 4;
  note_progress(w);
  if (w->chk) check_issue(w, i, CNT_LGKM, 1);
}
static void op_ds_append(Wave *w, const Inst *i) { counter(w, i, 1); }
static void op_ds_consume(Wave *w, const Inst *i) { counter(w, i, -1); }
/* Lane k's word is at M0 + offset + 4 * k. */
static void own_addresses(Wave *w, const Inst *i, u32 *at) { for (int l = 0; l < LANES; l++) at[l] = (w->s[SG_M0] & 0xffff) + (u32)i->imm + 4 * (u32)l; }
static void op_ds_read_addtid_b32(Wave *w, const Inst *i) {
  u32 at[LANES], out[1][LANES];
  int l;
  own_addresses(w, i, at);
  u8 *lds = lds_lanes(w, i, at, exec_of(w), 4, LDS_READ);
  if (!lds) return;
  FOR_ACTIVE(l, exec_of(w)) memcpy(&out[0][l], lds + at[l], 4);
  keep(w, i, out, 0, 1);
  done(w, i, 0, 4);
}
static void op_ds_write_addtid_b32(Wave *w, const Inst *i) {
  u32 at[LANES];
  int l;
  own_addresses(w, i, at);
  u8 *lds = lds_lanes(w, i, at, exec_of(w), 4, LDS_WRITE);
  if (!lds) return;
  FOR_ACTIVE(l, exec_of(w)) memcpy(lds + at[l], &w->v[i->src[0].idx][l], 4);
  done(w, i, 1, 4);
}
/* Two exchanges at two offsets. */
static void exchange2(Wave *w, const Inst *i, int bytes, u32 unit) {
  u32 at[LANES], out[2][2][LANES];
  u64 e = exec_of(w);
  int l;
  for (int h = 0; h < 2; h++) {
    lane_offsets(w, i, (u32)(h ? i->imm1 : i->imm) * unit, at);
    u8 *lds = lds_lanes(w, i, at, e, bytes, LDS_ATOMIC);
    if (!lds) return;
    FOR_ACTIVE(l, e)
      for (int k = 0; k < bytes / 4; k++) { memcpy(&out[h][k][l], lds + at[l] + 4 * k, 4); memcpy(lds + at[l] + 4 * k, &w->v[i->src[1 + h].idx + k][l], 4); }
  }
  for (int h = 0; h < 2; h++) keep(w, i, out[h], h * bytes / 4, bytes / 4);
  done(w, i, 1, 2 * (u64)bytes);
}
#define EXCHANGE2_LIST(X) X(ds_wrxchg2_rtn_b32, 4, 4) X(ds_wrxchg2_rtn_b64, 8, 8) X(ds_wrxchg2st64_rtn_b32, 4, 256) X(ds_wrxchg2st64_rtn_b64, 8, 512)
#define DEF_EXCHANGE2(name, b, unit) static void op_##name(Wave *w, const Inst *i) { exchange2(w, i, b, unit); }
EXCHANGE2_LIST(DEF_EXCHANGE2)
static u64 step_wrap(u64 o, u64 d, u64 c) { return o >= d ? o - d : o + c; }
/* The returning form has `_rtn` before its type, so each operation is listed with both names. */
#define BOTH(X, op, type, b) X(ds_##op##_##type, op##_##type, b) X(ds_##op##_rtn_##type, op##_##type, b)
#define ATOMIC_LIST(X) \
  BOTH(X, add, u32, 4) BOTH(X, sub, u32, 4) BOTH(X, rsub, u32, 4) BOTH(X, inc, u32, 4) BOTH(X, dec, u32, 4) BOTH(X, min, i32, 4) BOTH(X, max, i32, 4) BOTH(X, min, u32, 4) \
  BOTH(X, max, u32, 4) BOTH(X, and, b32, 4) BOTH(X, or, b32, 4) BOTH(X, xor, b32, 4) BOTH(X, mskor, b32, 4) BOTH(X, min, f32, 4) BOTH(X, max, f32, 4) BOTH(X, add, f32, 4) \
  BOTH(X, cmpst, b32, 4) BOTH(X, cmpst, f32, 4) BOTH(X, add, u64, 8) BOTH(X, sub, u64, 8) BOTH(X, rsub, u64, 8) BOTH(X, inc, u64, 8) BOTH(X, dec, u64, 8) BOTH(X, min, i64, 8) \
  BOTH(X, max, i64, 8) BOTH(X, min, u64, 8) BOTH(X, max, u64, 8) BOTH(X, and, b64, 8) BOTH(X, or, b64, 8) BOTH(X, xor, b64, 8) BOTH(X, mskor, b64, 8) BOTH(X, min, f64, 8) \
  BOTH(X, max, f64, 8) BOTH(X, add, f64, 8) BOTH(X, cmpst, b64, 8) BOTH(X, cmpst, f64, 8) X(ds_wrxchg_rtn_b32, wrxchg, 4) X(ds_wrxchg_rtn_b64, wrxchg, 8) \
  X(ds_wrap_rtn_b32, wrap, 4) X(ds_pk_add_f16, pk_f16, 4) X(ds_pk_add_rtn_f16, pk_f16, 4) X(ds_pk_add_bf16, pk_bf16, 4) X(ds_pk_add_rtn_bf16, pk_bf16, 4)
#define DEF_ATOMIC(name, step, b) static void op_##name(Wave *w, const Inst *i) { atomic(w, i, step_##step, b); }
ATOMIC_LIST(DEF_ATOMIC)

const OpEntry ds_ops[] = {READ_LIST(ENTRY) SMALL_LIST(ENTRY) READ2_LIST(ENTRY) WRITE_LIST(ENTRY) WRITE2_LIST(ENTRY) TR_LIST(ENTRY) ATOMIC_LIST(ENTRY) EXCHANGE2_LIST(ENTRY)
  ENTRY(ds_append) ENTRY(ds_consume) ENTRY(ds_read_addtid_b32) ENTRY(ds_write_addtid_b32) ENTRY(ds_bpermute_b32) ENTRY(ds_permute_b32) ENTRY(ds_swizzle_b32) ENTRY(ds_nop) {0, 0}};
