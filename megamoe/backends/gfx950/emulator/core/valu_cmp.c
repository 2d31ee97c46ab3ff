/* Comparisons: one bit a lane into a scalar pair; the cmpx forms write EXEC as well. */
#include "valu.h"

#define INT_ORDERS(X, T, bits, P) X(P##f_##T, bits, 0) X(P##lt_##T, bits, a < b) X(P##eq_##T, bits, a == b) X(P##le_##T, bits, a <= b) \
  X(P##gt_##T, bits, a > b) X(P##ne_##T, bits, a != b) X(P##ge_##T, bits, a >= b) X(P##t_##T, bits, 1)
#define FLOAT_ORDERS(X, T, bits, P) X(P##f_##T, bits, 0) X(P##lt_##T, bits, a < b) X(P##eq_##T, bits, a == b) X(P##le_##T, bits, a <= b) \
  X(P##gt_##T, bits, a > b) X(P##lg_##T, bits, a < b || a > b) X(P##ge_##T, bits, a >= b) X(P##o_##T, bits, a == a && b == b) \
  X(P##u_##T, bits, a != a || b != b) X(P##nge_##T, bits, !(a >= b)) X(P##nlg_##T, bits, !(a < b || a > b)) X(P##ngt_##T, bits, !(a > b)) \
  X(P##nle_##T, bits, !(a <= b)) X(P##neq_##T, bits, !(a == b)) X(P##nlt_##T, bits, !(a < b)) X(P##tru_##T, bits, 1)

#define BODY(type, load, e, is_x) \
  u64 r = 0; load \
  for (int l = 0; l < LANES; l++) { type a = VA, b = VB; (void)a; (void)b; r |= (u64)((e) ? 1 : 0) << l; } \
  r &= exec_of(w); set_pair(&w->s[i->sdst.idx], r); if (is_x) set_pair(&w->s[SG_EXEC], r);
#define ROWS(kind) u32 t00[LANES], t10[LANES]; const u32 *A = source_row(w, i, 0, 0, t00, kind), *B = source_row(w, i, 1, 0, t10, kind);
#define ROWS64(is_f) Wide x; wide_source(w, i, 0, x.a, is_f); wide_source(w, i, 1, x.b, is_f);

#define VA (i32)A[l]
#define VB (i32)B[l]
#define DEF_i32(name, x, e) static void op_##name(Wave *w, const Inst *i) { BODY(i32, ROWS(0), e, x) }
INT_ORDERS(DEF_i32, i32, 0, v_cmp_) INT_ORDERS(DEF_i32, i32, 1, v_cmpx_)
#undef VA
#undef VB
#define VA A[l]
#define VB B[l]
#define DEF_u32(name, x, e) static void op_##name(Wave *w, const Inst *i) { BODY(u32, ROWS(0), e, x) }
INT_ORDERS(DEF_u32, u32, 0, v_cmp_) INT_ORDERS(DEF_u32, u32, 1, v_cmpx_)
#undef VA
#undef VB
#define VA (int16_t)A[l]
#define VB (int16_t)B[l]
#define DEF_i16(name, x, e) static void op_##name(Wave *w, const Inst *i) { BODY(int16_t, ROWS(0), e, x) }
INT_ORDERS(DEF_i16, i16, 0, v_cmp_) INT_ORDERS(DEF_i16, i16, 1, v_cmpx_)
#undef VA
#undef VB
#define VA (u16)A[l]
#define VB (u16)B[l]
#define DEF_u16(name, x, e) static void op_##name(Wave *w, const Inst *i) { BODY(u16, ROWS(0), e, x) }
INT_ORDERS(DEF_u16, u16, 0, v_cmp_) INT_ORDERS(DEF_u16, u16, 1, v_cmpx_)
#undef VA
#undef VB
#define VA as_f(A[l])
#define VB as_f(B[l])
#define DEF_f32(name, x, e) static void op_##name(Wave *w, const Inst *i) { BODY(float, ROWS(0x80000000u), e, x) }
FLOAT_ORDERS(DEF_f32, f32, 0, v_cmp_) FLOAT_ORDERS(DEF_f32, f32, 1, v_cmpx_)
#undef VA
#undef VB
#define VA half_to_f(A[l] & 0xffff)
#define VB half_to_f(B[l] & 0xffff)
#define DEF_f16(name, x, e) static void op_##name(Wave *w, const Inst *i) { BODY(float, ROWS(0x8000u), e, x) }
FLOAT_ORDERS(DEF_f16, f16, 0, v_cmp_) FLOAT_ORDERS(DEF_f16, f16, 1, v_cmpx_)
#undef VA
#undef VB
#define VA (i64)x.a[l]
#define VB (i64)x.b[l]
#define DEF_i64(name, is_x, e) static void op_##name(Wave *w, const Inst *i) { BODY(i64, ROWS64(0), e, is_x) }
INT_ORDERS(DEF_i64, i64, 0, v_cmp_) INT_ORDERS(DEF_i64, i64, 1, v_cmpx_)
#undef VA
#undef VB
#define VA x.a[l]
#define VB x.b[l]
#define DEF_u64(name, is_x, e) static void op_##name(Wave *w, const Inst *i) { BODY(u64, ROWS64(0), e, is_x) }
INT_ORDERS(DEF_u64, u64, 0, v_cmp_) INT_ORDERS(DEF_u64, u64, 1, v_cmpx_)
#undef VA
#undef VB
#define VA as_d(x.a[l])
#define VB as_d(x.b[l])
#define DEF_f64(name, is_x, e) static void op_##name(Wave *w, const Inst *i) { BODY(double, ROWS64(1), e, is_x) }
FLOAT_ORDERS(DEF_f64, f64, 0, v_cmp_) FLOAT_ORDERS(DEF_f64, f64, 1, v_cmpx_)

/* Classes: 0 signalling NaN, 1 quiet NaN, 2 -inf, 3 -normal, 4 -denormal, 5 -0, 6 +0, 7 +denormal, 8 +normal, 9 +inf. */
static u32 class_of(u64 bits, int exponent, int mantissa) {
  u64 sign = bits >> (exponent + mantissa) & 1, e = bits >> mantissa & ((1u << exponent) - 1), m = bits & (((u64)1 << mantissa) - 1);
  if (e == (1u << exponent) - 1) return m ? (m >> (mantissa - 1) ? 2 : 1) : sign ? 4 : 512;
  if (e) return sign ? 8 : 256;
  if (m) return sign ? 16 : 128;
  return sign ? 32 : 64;
}
#define CLASS_LIST(X) X(v_cmp_class_f16, 5, 10, 0) X(v_cmpx_class_f16, 5, 10, 1) X(v_cmp_class_f32, 8, 23, 0) X(v_cmpx_class_f32, 8, 23, 1) \
  X(v_cmp_class_f64, 11, 52, 0) X(v_cmpx_class_f64, 11, 52, 1)
#define DEF_CLASS(name, ex, ma, is_x) static void op_##name(Wave *w, const Inst *i) { u64 r = 0; u64 a[LANES]; u32 t10[LANES], t00[LANES]; \
  if (ma == 52) wide_source(w, i, 0, a, 1); \
  else { const u32 *A = source_row(w, i, 0, 0, t00, ma == 10 ? 0x8000u : 0x80000000u); for (int l = 0; l < LANES; l++) a[l] = A[l]; } \
  const u32 *B = source_row(w, i, 1, 0, t10, 0); \
  for (int l = 0; l < LANES; l++) r |= (u64)((class_of(a[l], ex, ma) & B[l]) != 0) << l; \
  r &= exec_of(w); set_pair(&w->s[i->sdst.idx], r); if (is_x) set_pair(&w->s[SG_EXEC], r); }
CLASS_LIST(DEF_CLASS)

#define ALL(O, T) O(ENTRY, T, 0, v_cmp_) O(ENTRY, T, 0, v_cmpx_)
const OpEntry valu_cmp_ops[] = {
  ALL(INT_ORDERS, i16) ALL(INT_ORDERS, u16) ALL(INT_ORDERS, i32) ALL(INT_ORDERS, u32) ALL(INT_ORDERS, i64) ALL(INT_ORDERS, u64)
  ALL(FLOAT_ORDERS, f16) ALL(FLOAT_ORDERS, f32) ALL(FLOAT_ORDERS, f64) CLASS_LIST(ENTRY) {0, 0}};
