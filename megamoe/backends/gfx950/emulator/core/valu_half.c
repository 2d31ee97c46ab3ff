/* Half precision, bfloat16 and the packed instructions. */
#include "valu.h"

/* A 16-bit source as float: op_sel bit k picks the half, neg and abs act on it. */
static inline void half_source(Wave *w, const Inst *i, int k, float *out) {
  u32 t[LANES];
  const u32 *r = source_row(w, i, k, 0, t, 0);
  int at = i->opsel >> k & 1 ? 16 : 0;
  u32 keep = i->abs >> k & 1 ? 0x7fff : 0xffff, flip = i->neg >> k & 1 ? 0x8000 : 0;
  for (int l = 0; l < LANES; l++) out[l] = half_to_f(((r[l] >> at) & keep) ^ flip);
}
/* op_sel bit 3 picks the half written; otherwise the upper half becomes zero, or stays where `keep` says so. */
static inline void half_result(Wave *w, const Inst *i, const u32 *r, int keep) {
  u32 *D = w->v[i->dst.idx], x[LANES];
  for (int l = 0; l < LANES; l++)
    x[l] = i->opsel & 8 ? (D[l] & 0xffff) | r[l] << 16 : (keep ? D[l] & 0xffff0000u : 0) | (r[l] & 0xffff);
  merge_row(w, D, x);
}
static inline float hmax(float a, float b) { return a != a ? b : b != b ? a : a == b ? (signbit(a) ? b : a) : a > b ? a : b; }
static inline float hmin(float a, float b) { return a != a ? b : b != b ? a : a == b ? (signbit(a) ? a : b) : a < b ? a : b; }
static inline float hmed(float a, float b, float c) { return hmax(hmin(a, b), hmin(hmax(a, b), c)); }
static inline float hmant(float f) { int e; return f != f || f - f != 0 ? f : frexpf(f, &e); }
static inline float hround(double x) { return half_to_f(f_to_half((float)x)); }

#define HALF_LIST(X) \
  X(v_add_f16, 2, 0, a + b) X(v_sub_f16, 2, 0, a - b) X(v_subrev_f16, 2, 0, b - a) X(v_mul_f16, 2, 0, a * b) X(v_max_f16, 2, 0, hmax(a, b)) \
  X(v_min_f16, 2, 0, hmin(a, b)) X(v_fma_f16, 3, 1, (float)((double)a * b + c)) X(v_mad_f16, 3, 1, hround((double)a * b) + c) X(v_mad_legacy_f16, 3, 0, hround((double)a * b) + c) X(v_fma_legacy_f16, 3, 0, (float)((double)a * b + c)) \
  X(v_madmk_f16, 3, 0, hround((double)a * b) + c) X(v_madak_f16, 3, 0, hround((double)a * b) + c) \
  X(v_div_fixup_f16, 3, 1, c / b) X(v_div_fixup_legacy_f16, 3, 0, c / b) X(v_min3_f16, 3, 0, hmin(hmin(a, b), c)) X(v_max3_f16, 3, 0, hmax(hmax(a, b), c)) X(v_med3_f16, 3, 0, hmed(a, b, c)) \
  X(v_rcp_f16, 1, 0, 1.0f / a) X(v_sqrt_f16, 1, 0, sqrtf(a)) X(v_rsq_f16, 1, 0, 1.0f / sqrtf(a)) X(v_log_f16, 1, 0, log2f(a)) X(v_exp_f16, 1, 0, exp2f(a)) \
  X(v_floor_f16, 1, 0, floorf(a)) X(v_ceil_f16, 1, 0, ceilf(a)) X(v_trunc_f16, 1, 0, truncf(a)) X(v_rndne_f16, 1, 0, rintf(a)) \
  X(v_fract_f16, 1, 0, a - floorf(a)) X(v_frexp_mant_f16, 1, 0, hmant(a)) X(v_sin_f16, 1, 0, sinf(6.2831853f * a)) X(v_cos_f16, 1, 0, cosf(6.2831853f * a))
#define DEF_HALF(name, n, keep, e) static void op_##name(Wave *w, const Inst *i) { float fa[LANES], fb[LANES], fc[LANES]; u32 r[LANES]; \
  unsigned old = denormals_on(); half_source(w, i, 0, fa); if (n > 1) half_source(w, i, 1, fb); if (n > 2) half_source(w, i, 2, fc); \
  for (int l = 0; l < LANES; l++) { float a = fa[l], b = n > 1 ? fb[l] : 0, c = n > 2 ? fc[l] : 0; (void)a; (void)b; (void)c; r[l] = f_to_half(e); } \
  half_result(w, i, r, keep); denormals_back(old); }
HALF_LIST(DEF_HALF)
static void op_v_mac_f16(Wave *w, const Inst *i) {
  float a[LANES], b[LANES];
  u32 r[LANES], *D = w->v[i->dst.idx];
  half_source(w, i, 0, a);
  half_source(w, i, 1, b);
  for (int l = 0; l < LANES; l++) r[l] = f_to_half((float)((double)a[l] * b[l] + half_to_f(D[l] & 0xffff)));
  half_result(w, i, r, 0);
}
static void op_v_ldexp_f16(Wave *w, const Inst *i) {
  float a[LANES];
  u32 t[LANES], r[LANES];
  half_source(w, i, 0, a);
  const u32 *b = source_row(w, i, 1, 0, t, 0);
  for (int l = 0; l < LANES; l++) r[l] = f_to_half(ldexpf(a[l], (int16_t)b[l]));
  half_result(w, i, r, 0);
}
#define FROM_HALF_LIST(X) X(v_cvt_f32_f16, as_u(a)) X(v_frexp_exp_i16_f16, hexp(a)) \
  X(v_cvt_u16_f16, a != a || a <= 0 ? 0 : a >= 65535.0f ? 65535u : (u32)a) \
  X(v_cvt_i16_f16, (a != a ? 0 : a >= 32767.0f ? 32767u : a <= -32768.0f ? 0x8000u : (u32)(i32)a) & 0xffff)
static inline u32 hexp(float f) { int e; if (f == 0 || f != f || f - f != 0) return 0; frexpf(f, &e); return (u32)e & 0xffff; }
#define DEF_FROM_HALF(name, e) static void op_##name(Wave *w, const Inst *i) { float fa[LANES]; u32 r[LANES]; half_source(w, i, 0, fa); \
  for (int l = 0; l < LANES; l++) { float a = fa[l]; r[l] = (e); } merge_row(w, w->v[i->dst.idx], r); }
FROM_HALF_LIST(DEF_FROM_HALF)
#define TO_HALF_LIST(X) X(v_cvt_f16_f32, f, f_to_half(as_f(a))) X(v_cvt_f16_u16, i, f_to_half((float)(a & 0xffff))) X(v_cvt_f16_i16, i, f_to_half((float)(int16_t)a))
#define DEF_TO_HALF(name, kind, e) static void op_##name(Wave *w, const Inst *i) { u32 t00[LANES], r[LANES]; const u32 *A = ROW(0, 0, kind); \
  for (int l = 0; l < LANES; l++) { u32 a = A[l]; r[l] = (e); } half_result(w, i, r, 0); }
TO_HALF_LIST(DEF_TO_HALF)
static void op_v_cvt_f32_bf16(Wave *w, const Inst *i) {
  BEGIN1(i)
  int at = i->opsel & 1 ? 16 : 0;
  FOR_LANES STORE((A[l] >> at) << 16);
}
static void op_v_pack_b32_f16(Wave *w, const Inst *i) {
  BEGIN2(i)
  u32 ka = i->opsel & 1 ? 16 : 0, kb = i->opsel & 2 ? 16 : 0;
  u32 fa = i->neg & 1 ? 0x8000 : 0, fb = i->neg & 2 ? 0x8000 : 0, aa = i->abs & 1 ? 0x7fff : 0xffff, ab = i->abs & 2 ? 0x7fff : 0xffff;
  FOR_LANES STORE(((A[l] >> ka & aa) ^ fa) | ((B[l] >> kb & ab) ^ fb) << 16);
}

/* Packed 16-bit: each half of the result picks the halves of its sources. */
static inline void packed_source(Wave *w, const Inst *i, int k, int high, u32 *out) {
  u32 t[LANES];
  const u32 *r = source_row(w, i, k, 0, t, 0);
  int at = (high ? i->opsel_hi : i->opsel) >> k & 1 ? 16 : 0;
  u32 flip = (high ? i->neg_hi : i->neg) >> k & 1 ? 0x8000 : 0;
  for (int l = 0; l < LANES; l++) out[l] = ((r[l] >> at) & 0xffff) ^ flip;
}
#define PACKED(name, n, body) static void op_##name(Wave *w, const Inst *i) { u32 A[LANES], B[LANES], C[LANES], r[2][LANES], x[LANES]; \
  for (int h = 0; h < 2; h++) { packed_source(w, i, 0, h, A); packed_source(w, i, 1, h, B); if (n > 2) packed_source(w, i, 2, h, C); \
    for (int l = 0; l < LANES; l++) { u32 a = A[l], b = B[l], c = n > 2 ? C[l] : 0; (void)c; r[h][l] = (body) & 0xffff; } } \
  for (int l = 0; l < LANES; l++) x[l] = r[0][l] | r[1][l] << 16; merge_row(w, w->v[i->dst.idx], x); }
#define SAT_S(x) ((u32)((x) < -32768 ? -32768 : (x) > 32767 ? 32767 : (x)))
#define SAT_U(x) ((u32)((x) < 0 ? 0 : (x) > 65535 ? 65535 : (x)))
#define PK_INT_LIST(X) \
  X(v_pk_mad_i16, 3, i->clamp ? SAT_S((i32)(int16_t)a * (int16_t)b + (int16_t)c) : a * b + c) X(v_pk_mad_u16, 3, a * b + c) X(v_pk_mul_lo_u16, 2, a * b) \
  X(v_pk_add_i16, 2, i->clamp ? SAT_S((i32)(int16_t)a + (int16_t)b) : a + b) X(v_pk_sub_i16, 2, i->clamp ? SAT_S((i32)(int16_t)a - (int16_t)b) : a - b) \
  X(v_pk_add_u16, 2, i->clamp ? SAT_U((i32)(a + b)) : a + b) X(v_pk_sub_u16, 2, i->clamp ? SAT_U((i32)a - (i32)b) : a - b) \
  X(v_pk_lshlrev_b16, 2, b << (a & 15)) X(v_pk_lshrrev_b16, 2, b >> (a & 15)) X(v_pk_ashrrev_i16, 2, (u32)((int16_t)b >> (a & 15))) \
  X(v_pk_max_i16, 2, (int16_t)a > (int16_t)b ? a : b) X(v_pk_min_i16, 2, (int16_t)a < (int16_t)b ? a : b) X(v_pk_max_u16, 2, a > b ? a : b) X(v_pk_min_u16, 2, a < b ? a : b)
PK_INT_LIST(PACKED)
#define HA half_to_f(a)
#define HB half_to_f(b)
#define HC half_to_f(c)
#define CLAMPED(x) f_to_half(i->clamp ? fminf(fmaxf(x, 0.0f), 1.0f) : (x))
#define PK_HALF_LIST(X) \
  X(v_pk_add_f16, 2, CLAMPED(HA + HB)) X(v_pk_mul_f16, 2, CLAMPED(HA * HB)) X(v_pk_fma_f16, 3, CLAMPED((float)((double)HA * HB + HC))) \
  X(v_pk_min_f16, 2, CLAMPED(hmin(HA, HB))) X(v_pk_max_f16, 2, CLAMPED(hmax(HA, HB))) \
  X(v_pk_minimum3_f16, 3, HA != HA || HB != HB || HC != HC ? 0x7e00u : f_to_half(hmin(hmin(HA, HB), HC))) \
  X(v_pk_maximum3_f16, 3, HA != HA || HB != HB || HC != HC ? 0x7e00u : f_to_half(hmax(hmax(HA, HB), HC)))
PK_HALF_LIST(PACKED)
static void op_v_pk_fmac_f16(Wave *w, const Inst *i) {
  BEGIN2(i)
  FOR_LANES STORE(f_to_half((float)((double)half_to_f(A[l] & 0xffff) * half_to_f(B[l] & 0xffff) + half_to_f(D[l] & 0xffff)))
    | f_to_half((float)((double)half_to_f(A[l] >> 16) * half_to_f(B[l] >> 16) + half_to_f(D[l] >> 16))) << 16);
}
/* Halves as normalized integers; each source may pick its high half. */
static inline u32 norm_signed(float f) { return f != f ? 0 : (u32)(i32)rintf(fminf(fmaxf(f, -1), 1) * 32767) & 0xffff; }
static inline u32 norm_unsigned(float f) { return f != f ? 0 : (u32)rintf(fminf(fmaxf(f, 0), 1) * 65535); }
#define NORM_LIST(X) X(v_cvt_norm_i16_f16, 1, norm_signed) X(v_cvt_norm_u16_f16, 1, norm_unsigned) X(v_cvt_pknorm_i16_f16, 2, norm_signed) X(v_cvt_pknorm_u16_f16, 2, norm_unsigned)
#define DEF_NORM(name, n, norm) static void op_##name(Wave *w, const Inst *i) { float a[LANES], b[LANES]; u32 r[LANES]; half_source(w, i, 0, a); if (n > 1) half_source(w, i, 1, b); \
  for (int l = 0; l < LANES; l++) r[l] = norm(a[l]) | (n > 1 ? norm(b[l]) << 16 : 0); merge_row(w, w->v[i->dst.idx], r); }
NORM_LIST(DEF_NORM)

/* Packed single: each result picks a dword of each pair; a constant stands for both. */
static inline const u32 *pair_source(Wave *w, const Inst *i, int k, int high, u32 *t) {
  int half = (high ? i->opsel_hi : i->opsel) >> k & 1;
  u32 flip = (high ? i->neg_hi : i->neg) >> k & 1 ? 0x80000000u : 0;
  const Operand *o = &i->src[k];
  if (o->kind == K_VGPR && !flip) return w->v[o->idx + half];
  if (o->kind == K_VGPR) { const u32 *r = w->v[o->idx + half]; for (int l = 0; l < LANES; l++) t[l] = r[l] ^ flip; return t; }
  u32 x = o->kind == K_SGPR ? w->s[o->idx + half] : o->kind == K_CONST ? o->lo : special_value(w, o->idx, half);
  for (int l = 0; l < LANES; l++) t[l] = x ^ flip;
  return t;
}
#define PK_SINGLE_LIST(X) X(v_pk_add_f32, 2, a + b) X(v_pk_mul_f32, 2, a * b) X(v_pk_fma_f32, 3, fmaf(a, b, c))
#define DEF_PK_SINGLE(name, n, e) static void op_##name(Wave *w, const Inst *i) { u32 ta[LANES], tb[LANES], tc[LANES], r[2][LANES]; \
  for (int h = 0; h < 2; h++) { const u32 *A = pair_source(w, i, 0, h, ta), *B = pair_source(w, i, 1, h, tb), *C = n > 2 ? pair_source(w, i, 2, h, tc) : A; \
    u32 *R = r[h]; FOR_LANES { float a = as_f(A[l]), b = as_f(B[l]), c = as_f(C[l]); (void)c; R[l] = as_u(e); } \
    if (i->clamp) for (int l = 0; l < LANES; l++) R[l] = as_u(fminf(fmaxf(as_f(R[l]), 0.0f), 1.0f)); } \
  merge_row(w, w->v[i->dst.idx], r[0]); merge_row(w, w->v[i->dst.idx + 1], r[1]); }
PK_SINGLE_LIST(DEF_PK_SINGLE)
static void op_v_pk_mov_b32(Wave *w, const Inst *i) {
  u32 ta[LANES], tb[LANES], r[2][LANES];
  const u32 *lo = pair_source(w, i, 0, 0, ta);
  Inst j = *i; /* the second result takes its half from op_sel bit 1 of source 1 */
  j.opsel_hi = i->opsel;
  const u32 *hi = pair_source(w, &j, 1, 1, tb);
  memcpy(r[0], lo, sizeof r[0]);
  memcpy(r[1], hi, sizeof r[1]);
  merge_row(w, w->v[i->dst.idx], r[0]);
  merge_row(w, w->v[i->dst.idx + 1], r[1]);
}

/* Mixed: a source is half (op_sel_hi) or single precision; neg_hi is its absolute value. */
static inline void mixed_source(Wave *w, const Inst *i, int k, float *out) {
  u32 t[LANES];
  const u32 *r = source_row(w, i, k, 0, t, 0);
  int is_half = i->opsel_hi >> k & 1, at = i->opsel >> k & 1 ? 16 : 0;
  for (int l = 0; l < LANES; l++) {
    float f = is_half ? half_to_f(r[l] >> at & 0xffff) : as_f(r[l]);
    if (i->neg_hi >> k & 1) f = fabsf(f);
    out[l] = i->neg >> k & 1 ? -f : f;
  }
}
#define MIX_LIST(X) X(v_fma_mix_f32, as_u(f)) X(v_fma_mixlo_f16, (D[l] & 0xffff0000u) | f_to_half(f)) X(v_fma_mixhi_f16, (D[l] & 0xffff) | f_to_half(f) << 16)
#define DEF_MIX(name, e) static void op_##name(Wave *w, const Inst *i) { float a[LANES], b[LANES], c[LANES]; const u32 *m = lanes_of(w); u32 *D = w->v[i->dst.idx]; \
  mixed_source(w, i, 0, a); mixed_source(w, i, 1, b); mixed_source(w, i, 2, c); \
  for (int l = 0; l < LANES; l++) { float f = fmaf(a[l], b[l], c[l]); if (i->clamp) f = fminf(fmaxf(f, 0.0f), 1.0f); STORE(e); } }
MIX_LIST(DEF_MIX)

#define DOT_LIST(X) \
  X(v_dot2_f32_f16, f, as_u(half_to_f(a & 0xffff) * half_to_f(b & 0xffff) + half_to_f(a >> 16) * half_to_f(b >> 16) + fc)) \
  X(v_dot2_f32_bf16, f, as_u(as_f(a << 16) * as_f(b << 16) + as_f(a & 0xffff0000u) * as_f(b & 0xffff0000u) + fc))
DOT_LIST(DEF_V3)
#define DOTC_LIST(X) \
  X(v_dot2c_f32_f16, i, as_u(half_to_f(a & 0xffff) * half_to_f(b & 0xffff) + half_to_f(a >> 16) * half_to_f(b >> 16) + as_f(D[l]))) \
  X(v_dot2c_f32_bf16, i, as_u(as_f(a << 16) * as_f(b << 16) + as_f(a & 0xffff0000u) * as_f(b & 0xffff0000u) + as_f(D[l])))
DOTC_LIST(DEF_V2)

const OpEntry valu_half_ops[] = {
  HALF_LIST(ENTRY) FROM_HALF_LIST(ENTRY) TO_HALF_LIST(ENTRY) PK_INT_LIST(ENTRY) PK_HALF_LIST(ENTRY) PK_SINGLE_LIST(ENTRY) MIX_LIST(ENTRY)
  DOT_LIST(ENTRY) DOTC_LIST(ENTRY) NORM_LIST(ENTRY) ENTRY(v_pk_fmac_f16) ENTRY(v_mac_f16) ENTRY(v_ldexp_f16) ENTRY(v_cvt_f32_bf16) ENTRY(v_pack_b32_f16) ENTRY(v_pk_mov_b32) {0, 0}};
