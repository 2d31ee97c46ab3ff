/* Formats below sixteen bits: E4M3 (fp8), E5M2 (bf8), E2M1 (fp4), E2M3 (fp6), E3M2 (bf6), and their scaled conversions.
 * A scale is a float of which only the exponent counts; to a small format the value is divided by it. */
#include "small_float.h"

static float small_to_f(u32 x, int exponent, int mantissa, int bias) {
  u32 e = x >> mantissa & ((1u << exponent) - 1), m = x & ((1u << mantissa) - 1);
  float f = e ? ldexpf((float)(m | 1u << mantissa), (int)e - bias - mantissa) : ldexpf((float)m, 1 - bias - mantissa);
  return x >> (exponent + mantissa) & 1 ? -f : f;
}
float fp8_to_f(u32 x) { return (x & 0x7f) == 0x7f ? NAN : small_to_f(x & 255, 4, 3, 7); }
float bf8_to_f(u32 x) {
  if ((x & 0x7c) == 0x7c) return x & 3 ? NAN : x & 0x80 ? -INFINITY : INFINITY;
  return small_to_f(x & 255, 5, 2, 15);
}
float fp4_to_f(u32 x) { return small_to_f(x & 15, 2, 1, 1); }
float fp6_to_f(u32 x) { return small_to_f(x & 63, 2, 3, 1); }
float bf6_to_f(u32 x) { return small_to_f(x & 63, 3, 2, 3); }

static inline u32 to_fp8(const Wave *w, double x) { return rounded(w, x, &FP8); }
static inline u32 to_bf8(const Wave *w, double x) { return rounded(w, x, &BF8); }
static inline u32 to_fp4(const Wave *w, double x) { return rounded(w, x, &FP4); }

/* Plain conversions. The byte or word read comes from op_sel (VOP3) or from SDWA, which has then already selected it. */
#define FROM8_LIST(X) X(v_cvt_f32_fp8, fp8_to_f) X(v_cvt_f32_bf8, bf8_to_f)
#define DEF_FROM8(name, f) static void op_##name(Wave *w, const Inst *i) { BEGIN1(i) int at = 8 * (i->opsel & 3); \
  for (int l = 0; l < LANES; l++) STORE(as_u(f(A[l] >> at & 255))); }
FROM8_LIST(DEF_FROM8)
#define FROM8PK_LIST(X) X(v_cvt_pk_f32_fp8, fp8_to_f) X(v_cvt_pk_f32_bf8, bf8_to_f)
#define DEF_FROM8PK(name, f) static void op_##name(Wave *w, const Inst *i) { u32 t00[LANES], r[2][LANES]; const u32 *A = ROW(0, 0, i); int at = i->opsel & 1 ? 16 : 0; \
  for (int l = 0; l < LANES; l++) { r[0][l] = as_u(f(A[l] >> at & 255)); r[1][l] = as_u(f(A[l] >> (at + 8) & 255)); } \
  merge_row(w, w->v[i->dst.idx], r[0]); merge_row(w, w->v[i->dst.idx + 1], r[1]); }
FROM8PK_LIST(DEF_FROM8PK)
#define TO8_LIST(X) X(v_cvt_pk_fp8_f32, to_fp8) X(v_cvt_pk_bf8_f32, to_bf8)
#define DEF_TO8(name, to8) static void op_##name(Wave *w, const Inst *i) { BEGIN2(f) int at = i->opsel & 8 ? 16 : 0; u64 e = exec_of(w); \
  for (int l = 0; l < LANES; l++) if (e >> l & 1) { u32 x = to8(w, as_f(A[l])) | to8(w, as_f(B[l])) << 8; STORE((D[l] & ~(0xffffu << at)) | x << at); } }
TO8_LIST(DEF_TO8)

/* Scaled, two values at a time from two floats: X(name, to, bits of one value). */
#define SCALED_F32_LIST(X) X(v_cvt_scalef32_pk_fp8_f32, to_fp8, 8) X(v_cvt_scalef32_pk_bf8_f32, to_bf8, 8) X(v_cvt_scalef32_pk_fp4_f32, to_fp4, 4)
#define DEST_AT(bits) (bits == 8 ? (i->opsel & 8 ? 16 : 0) : 8 * (i->opsel >> 2 & 3))
#define DEF_SCALED_F32(name, to, bits) static void op_##name(Wave *w, const Inst *i) { BEGIN3(f) int at = DEST_AT(bits); u32 field = bits == 8 ? 0xffff : 0xff; u64 e = exec_of(w); \
  for (int l = 0; l < LANES; l++) if (e >> l & 1) { double s = scale_of(C[l]); u32 x = to(w, divided(as_f(A[l]), s)) | to(w, divided(as_f(B[l]), s)) << bits; \
    STORE((D[l] & ~(field << at)) | x << at); } }
SCALED_F32_LIST(DEF_SCALED_F32)
#define LOW_h(x) half_to_f((x) & 0xffff)
#define HIGH_h(x) half_to_f((x) >> 16)
#define LOW_b(x) as_f((x) << 16)
#define HIGH_b(x) as_f((x) & 0xffff0000u)
#define SCALED_16_LIST(X) X(v_cvt_scalef32_pk_fp8_f16, to_fp8, 8, h) X(v_cvt_scalef32_pk_bf8_f16, to_bf8, 8, h) X(v_cvt_scalef32_pk_fp8_bf16, to_fp8, 8, b) \
  X(v_cvt_scalef32_pk_bf8_bf16, to_bf8, 8, b) X(v_cvt_scalef32_pk_fp4_f16, to_fp4, 4, h) X(v_cvt_scalef32_pk_fp4_bf16, to_fp4, 4, b)
#define DEF_SCALED_16(name, to, bits, k) static void op_##name(Wave *w, const Inst *i) { BEGIN2(i) int at = DEST_AT(bits); u32 field = bits == 8 ? 0xffff : 0xff; u64 e = exec_of(w); \
  for (int l = 0; l < LANES; l++) if (e >> l & 1) { double s = scale_of(B[l]); u32 x = to(w, divided(LOW_##k(A[l]), s)) | to(w, divided(HIGH_##k(A[l]), s)) << bits; \
    STORE((D[l] & ~(field << at)) | x << at); } }
SCALED_16_LIST(DEF_SCALED_16)

/* Scaled, from a small format: X(name, from, bits, result f32 | f16 | bf16). */
#define SRC_AT(bits) (bits == 8 ? (i->opsel & 1 ? 16 : 0) : 8 * (i->opsel & 3))
#define UNSCALE_F32_LIST(X) X(v_cvt_scalef32_pk_f32_fp8, fp8_to_f, 8) X(v_cvt_scalef32_pk_f32_bf8, bf8_to_f, 8) X(v_cvt_scalef32_pk_f32_fp4, fp4_to_f, 4)
#define DEF_UNSCALE_F32(name, from, bits) static void op_##name(Wave *w, const Inst *i) { u32 t00[LANES], t10[LANES], r[2][LANES]; \
  const u32 *A = ROW(0, 0, i), *B = ROW(1, 0, i); int at = SRC_AT(bits); u32 one = (1u << bits) - 1; \
  for (int l = 0; l < LANES; l++) { double s = scale_of(B[l]); r[0][l] = as_u((float)(from(A[l] >> at & one) * s)); r[1][l] = as_u((float)(from(A[l] >> (at + bits) & one) * s)); } \
  merge_row(w, w->v[i->dst.idx], r[0]); merge_row(w, w->v[i->dst.idx + 1], r[1]); }
UNSCALE_F32_LIST(DEF_UNSCALE_F32)
#define UNSCALE_16_LIST(X) X(v_cvt_scalef32_pk_f16_fp8, fp8_to_f, 8, f_to_half) X(v_cvt_scalef32_pk_f16_bf8, bf8_to_f, 8, f_to_half) \
  X(v_cvt_scalef32_pk_bf16_fp8, fp8_to_f, 8, bf16_of) X(v_cvt_scalef32_pk_bf16_bf8, bf8_to_f, 8, bf16_of) \
  X(v_cvt_scalef32_pk_f16_fp4, fp4_to_f, 4, f_to_half) X(v_cvt_scalef32_pk_bf16_fp4, fp4_to_f, 4, bf16_of)
#define DEF_UNSCALE_16(name, from, bits, to) static void op_##name(Wave *w, const Inst *i) { BEGIN2(i) int at = SRC_AT(bits); u32 one = (1u << bits) - 1; \
  for (int l = 0; l < LANES; l++) { double s = scale_of(B[l]); STORE((u32)to((float)(from(A[l] >> at & one) * s)) | (u32)to((float)(from(A[l] >> (at + bits) & one) * s)) << 16); } }
UNSCALE_16_LIST(DEF_UNSCALE_16)
#define UNSCALE_ONE_LIST(X) X(v_cvt_scalef32_f32_fp8, fp8_to_f) X(v_cvt_scalef32_f32_bf8, bf8_to_f)
#define DEF_UNSCALE_ONE(name, from) static void op_##name(Wave *w, const Inst *i) { BEGIN2(i) int at = 8 * (i->opsel & 3); \
  for (int l = 0; l < LANES; l++) STORE(as_u((float)(from(A[l] >> at & 255) * scale_of(B[l])))); }
UNSCALE_ONE_LIST(DEF_UNSCALE_ONE)
#define UNSCALE_HALF_LIST(X) X(v_cvt_scalef32_f16_fp8, fp8_to_f) X(v_cvt_scalef32_f16_bf8, bf8_to_f)
#define DEF_UNSCALE_HALF(name, from) static void op_##name(Wave *w, const Inst *i) { BEGIN2(i) int at = 8 * (i->opsel & 3), to = i->opsel & 8 ? 16 : 0; \
  for (int l = 0; l < LANES; l++) { u32 h = f_to_half((float)(from(A[l] >> at & 255) * scale_of(B[l]))); STORE((D[l] & ~(0xffffu << to)) | h << to); } }
UNSCALE_HALF_LIST(DEF_UNSCALE_HALF)

const OpEntry valu_small_ops[] = {
  FROM8_LIST(ENTRY) FROM8PK_LIST(ENTRY) TO8_LIST(ENTRY) SCALED_F32_LIST(ENTRY) SCALED_16_LIST(ENTRY) UNSCALE_F32_LIST(ENTRY)
  UNSCALE_16_LIST(ENTRY) UNSCALE_ONE_LIST(ENTRY) UNSCALE_HALF_LIST(ENTRY) {0, 0}};
