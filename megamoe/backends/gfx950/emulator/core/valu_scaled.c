/* Conversions to small formats with stochastic rounding, and those of 32 values to and from six-bit formats.
 *
 * AMD's host reference for these instructions (amd_hip_ocp_host.hpp of HIP) gives the rules: the seed's top bits are added
 * below the kept mantissa, every element of a packed conversion takes the same seed, a scale is an exponent. The two
 * sources of 2xpk16 are interleaved: code 2k is element k of the first, code 2k + 1 of the second. */
#include "small_float.h"

#define EXPONENT(s) ((int)((s) >> 23 & 255) - 127)
#define NAN_SCALE(s) (((s) >> 23 & 255) == 255)
static inline u32 scaled(const Wave *w, u32 x, const Small *from, u32 seed, u32 scale, const Small *t) {
  return NAN_SCALE(scale) ? (x >> (from->exponent + from->mantissa) & 1) << (t->exponent + t->mantissa) | t->nan : stochastic(w, x, from, seed, EXPONENT(scale), t);
}
#define ACTIVE(body) u64 e_ = exec_of(w); for (int l = 0; l < LANES; l++) if (e_ >> l & 1) { body }
#define BYTE_AT (8 * (i->opsel >> 2 & 3))
#define PUT_FIELD(x, bits, at) D[l] = (D[l] & ~(((1u << (bits)) - 1) << (at))) | (x) << (at)

#define SR_LIST(X) X(v_cvt_sr_fp8_f32, FP8, 8, BYTE_AT) X(v_cvt_sr_bf8_f32, BF8, 8, BYTE_AT) X(v_cvt_sr_f16_f32, F16, 16, i->opsel & 8 ? 16 : 0) X(v_cvt_sr_bf16_f32, BF16, 16, i->opsel & 8 ? 16 : 0)
#define DEF_SR(name, T, bits, at) static void op_##name(Wave *w, const Inst *i) { BEGIN2(f) (void)m; \
  ACTIVE(u32 x = stochastic(w, A[l], &F32, B[l], 0, &T); PUT_FIELD(x, bits, at);) }
SR_LIST(DEF_SR)
#define SCALED_SR_LIST(X) X(v_cvt_scalef32_sr_fp8_f32, F32, FP8) X(v_cvt_scalef32_sr_bf8_f32, F32, BF8) X(v_cvt_scalef32_sr_fp8_f16, F16, FP8) X(v_cvt_scalef32_sr_bf8_f16, F16, BF8) \
  X(v_cvt_scalef32_sr_fp8_bf16, BF16, FP8) X(v_cvt_scalef32_sr_bf8_bf16, BF16, BF8)
#define DEF_SCALED_SR(name, F, T) static void op_##name(Wave *w, const Inst *i) { BEGIN3(i) (void)m; \
  ACTIVE(u32 x = scaled(w, A[l], &F, B[l], C[l], &T); PUT_FIELD(x, 8, BYTE_AT);) }
SCALED_SR_LIST(DEF_SCALED_SR)

/* Element k of a source of packed values: one to a register for f32, two for the others. */
static inline u32 value_at(Wave *w, u32 row, int k, int l, const Small *f) { return f->mantissa == 23 ? w->v[row + k][l] : w->v[row + k / 2][l] >> 16 * (k & 1) & 0xffff; }
#define SR_FP4_LIST(X) X(v_cvt_scalef32_sr_pk_fp4_f32, F32) X(v_cvt_scalef32_sr_pk_fp4_f16, F16) X(v_cvt_scalef32_sr_pk_fp4_bf16, BF16)
#define DEF_SR_FP4(name, F) static void op_##name(Wave *w, const Inst *i) { \
  u32 t1[LANES], t2[LANES], row = i->src[0].idx, *D = w->v[i->dst.idx]; const u32 *B = source_row(w, i, 1, 0, t1, 0), *C = source_row(w, i, 2, 0, t2, 0); \
  ACTIVE(u32 x = scaled(w, value_at(w, row, 0, l, &F), &F, B[l], C[l], &FP4) | scaled(w, value_at(w, row, 1, l, &F), &F, B[l], C[l], &FP4) << 4; PUT_FIELD(x, 8, BYTE_AT);) }
SR_FP4_LIST(DEF_SR_FP4)

/* Thirty-two values and a little-endian stream of six-bit codes. */
static inline void put_code(u32 *out, int k, u32 code) {
  int bit = 6 * k, word = bit / 32, at = bit % 32;
  out[word] |= code << at;
  if (at > 26) out[word + 1] |= code >> (32 - at);
}
static void to_six(Wave *w, const Inst *i, const Small *from, const Small *t, int seeded, int interleaved) {
  u32 t1[LANES], t2[LANES], r[6][LANES];
  const u32 *scale = source_row(w, i, i->nsrc - 1, 0, t1, 0), *seed = seeded ? source_row(w, i, 1, 0, t2, 0) : 0;
  u64 e = exec_of(w);
  for (int l = 0; l < LANES; l++) {
    u32 out[7] = {0};
    for (int k = 0; k < 32 && e >> l & 1; k++) {
      u32 x = interleaved ? w->v[i->src[k & 1].idx + k / 2][l] : value_at(w, i->src[0].idx, k, l, from);
      double value = from->mantissa == 23 ? (double)as_f(x) : from->mantissa == 10 ? half_to_f(x) : as_f(x << 16);
      put_code(out, k, seeded ? scaled(w, x, from, seed[l], scale[l], t) : rounded(w, divided(value, scale_of(scale[l])), t));
    }
    for (int k = 0; k < 6; k++) r[k][l] = out[k];
  }
  for (int k = 0; k < 6; k++) merge_row(w, w->v[i->dst.idx + k], r[k]);
}
#define TO_SIX_LIST(X) X(v_cvt_scalef32_2xpk16_fp6_f32, F32, FP6, 0, 1) X(v_cvt_scalef32_2xpk16_bf6_f32, F32, BF6, 0, 1) \
  X(v_cvt_scalef32_pk32_fp6_f16, F16, FP6, 0, 0) X(v_cvt_scalef32_pk32_bf6_f16, F16, BF6, 0, 0) X(v_cvt_scalef32_pk32_fp6_bf16, BF16, FP6, 0, 0) X(v_cvt_scalef32_pk32_bf6_bf16, BF16, BF6, 0, 0) \
  X(v_cvt_scalef32_sr_pk32_fp6_f32, F32, FP6, 1, 0) X(v_cvt_scalef32_sr_pk32_bf6_f32, F32, BF6, 1, 0) X(v_cvt_scalef32_sr_pk32_fp6_f16, F16, FP6, 1, 0) \
  X(v_cvt_scalef32_sr_pk32_bf6_f16, F16, BF6, 1, 0) X(v_cvt_scalef32_sr_pk32_fp6_bf16, BF16, FP6, 1, 0) X(v_cvt_scalef32_sr_pk32_bf6_bf16, BF16, BF6, 1, 0)
#define DEF_TO_SIX(name, F, T, seeded, both) static void op_##name(Wave *w, const Inst *i) { to_six(w, i, &F, &T, seeded, both); }
TO_SIX_LIST(DEF_TO_SIX)

static void from_six(Wave *w, const Inst *i, float (*decode)(u32), int kind) {
  u32 t[LANES], r[32][LANES];
  const u32 *scale = source_row(w, i, 1, 0, t, 0);
  int words = kind ? 16 : 32;
  memset(r, 0, sizeof r);
  for (int k = 0; k < 32; k++) {
    int bit = 6 * k, word = bit / 32, at = bit % 32;
    const u32 *low = w->v[i->src[0].idx + word], *high = at > 26 ? w->v[i->src[0].idx + word + 1] : low;
    for (int l = 0; l < LANES; l++) {
      float f = (float)(decode((u32)((low[l] | (u64)high[l] << 32) >> at) & 63) * scale_of(scale[l]));
      if (!kind) r[k][l] = as_u(f);
      else r[k / 2][l] |= (u32)(kind == 1 ? f_to_half(f) : bf16_of(f)) << 16 * (k & 1);
    }
  }
  for (int k = 0; k < words; k++) merge_row(w, w->v[i->dst.idx + k], r[k]);
}
#define FROM_SIX_LIST(X) X(v_cvt_scalef32_pk32_f32_fp6, fp6_to_f, 0) X(v_cvt_scalef32_pk32_f32_bf6, bf6_to_f, 0) X(v_cvt_scalef32_pk32_f16_fp6, fp6_to_f, 1) \
  X(v_cvt_scalef32_pk32_f16_bf6, bf6_to_f, 1) X(v_cvt_scalef32_pk32_bf16_fp6, fp6_to_f, 2) X(v_cvt_scalef32_pk32_bf16_bf6, bf6_to_f, 2)
#define DEF_FROM_SIX(name, decode, kind) static void op_##name(Wave *w, const Inst *i) { from_six(w, i, decode, kind); }
FROM_SIX_LIST(DEF_FROM_SIX)

const OpEntry valu_scaled_ops[] = {SR_LIST(ENTRY) SCALED_SR_LIST(ENTRY) SR_FP4_LIST(ENTRY) TO_SIX_LIST(ENTRY) FROM_SIX_LIST(ENTRY) {0, 0}};
