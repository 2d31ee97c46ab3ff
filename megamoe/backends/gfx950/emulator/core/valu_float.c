/* Single and double precision of the vector unit. Transcendentals are the correctly rounded library values, which lie
 * inside the hardware's one-ulp bound. */
#include "valu.h"

static inline u32 fmax_bits(u32 a, u32 b) {
  float x = as_f(a), y = as_f(b);
  return x != x ? b : y != y ? a : x == y ? a & b : x > y ? a : b;
}
static inline u32 fmin_bits(u32 a, u32 b) {
  float x = as_f(a), y = as_f(b);
  return x != x ? b : y != y ? a : x == y ? a | b : x < y ? a : b;
}
static inline u32 fmed(u32 a, u32 b, u32 c) {
  if (as_f(a) != as_f(a) || as_f(b) != as_f(b) || as_f(c) != as_f(c)) return fmin_bits(fmin_bits(a, b), c);
  return fmax_bits(fmin_bits(a, b), fmin_bits(fmax_bits(a, b), c));
}
static inline u32 nan_or(u32 a, u32 b, u32 c, u32 r) {
  return as_f(a) != as_f(a) || as_f(b) != as_f(b) || as_f(c) != as_f(c) ? 0x7fc00000u : r;
}
static inline u32 to_u32(float f) { return f != f || f <= 0 ? 0 : f >= 4294967296.0f ? ~0u : (u32)f; }
static inline u32 to_i32(float f) { return f != f ? 0 : f >= 2147483648.0f ? 0x7fffffffu : f < -2147483648.0f ? 0x80000000u : (u32)(i32)f; }
static inline u32 frexp_exp(float f) { int e; if (f == 0 || f != f || f - f != 0) return 0; frexpf(f, &e); return (u32)e; }
static inline float frexp_mant(float f) { int e; return f != f || f - f != 0 ? f : frexpf(f, &e); }
static inline float fract(float f) { float r = f - floorf(f); return r < 1.0f ? r : 0x1.fffffep-1f; }
static inline u32 pkrtz(float f) { /* float to half, towards zero */
  u32 h = f_to_half(f);
  float back = half_to_f(h);
  if (f == f && fabsf(back) > fabsf(f)) h--;
  return h & 0xffff;
}

#define ONE_LIST(X) \
  X(v_cvt_f32_i32, i, as_u((float)(i32)a)) X(v_cvt_f32_u32, i, as_u((float)a)) X(v_cvt_u32_f32, f, to_u32(fa)) X(v_cvt_i32_f32, f, to_i32(fa)) \
  X(v_cvt_rpi_i32_f32, f, to_i32(floorf(fa + 0.5f))) X(v_cvt_flr_i32_f32, f, to_i32(floorf(fa))) \
  X(v_cvt_off_f32_i4, i, as_u((float)((i32)(a << 28) >> 28) / 16.0f)) \
  X(v_cvt_f32_ubyte0, i, as_u((float)(a & 255))) X(v_cvt_f32_ubyte1, i, as_u((float)(a >> 8 & 255))) \
  X(v_cvt_f32_ubyte2, i, as_u((float)(a >> 16 & 255))) X(v_cvt_f32_ubyte3, i, as_u((float)(a >> 24))) \
  X(v_fract_f32, f, as_u(fract(fa))) X(v_trunc_f32, f, as_u(truncf(fa))) X(v_ceil_f32, f, as_u(ceilf(fa))) X(v_rndne_f32, f, as_u(rintf(fa))) \
  X(v_floor_f32, f, as_u(floorf(fa))) X(v_exp_f32, f, as_u(exp2f(fa))) X(v_log_f32, f, as_u(log2f(fa))) \
  X(v_rcp_f32, f, as_u(1.0f / fa)) X(v_rcp_iflag_f32, f, as_u(1.0f / fa)) X(v_rsq_f32, f, as_u((float)(1.0 / sqrt((double)fa)))) X(v_sqrt_f32, f, as_u(sqrtf(fa))) \
  X(v_sin_f32, f, as_u((float)sin(6.283185307179586 * fa))) X(v_cos_f32, f, as_u((float)cos(6.283185307179586 * fa))) \
  X(v_exp_legacy_f32, f, as_u(exp2f(fa))) X(v_log_legacy_f32, f, as_u(log2f(fa))) \
  X(v_frexp_exp_i32_f32, f, frexp_exp(fa)) X(v_frexp_mant_f32, f, as_u(frexp_mant(fa)))
ONE_LIST(DEF_V1)

#define TWO_LIST(X) \
  X(v_add_f32, f, as_u(fa + fb)) X(v_sub_f32, f, as_u(fa - fb)) X(v_subrev_f32, f, as_u(fb - fa)) X(v_mul_f32, f, as_u(fa * fb)) \
  X(v_mul_legacy_f32, f, fa == 0 || fb == 0 ? 0 : as_u(fa * fb)) X(v_min_f32, f, fmin_bits(a, b)) X(v_max_f32, f, fmax_bits(a, b)) \
  X(v_fmac_f32, f, as_u(fmaf(fa, fb, as_f(D[l])))) \
  X(v_cvt_pkrtz_f16_f32, f, pkrtz(fa) | pkrtz(fb) << 16) X(v_cvt_pk_f16_f32, f, f_to_half(fa) | f_to_half(fb) << 16) \
  X(v_cvt_pk_bf16_f32, f, bf16_of(fa) | (u32)bf16_of(fb) << 16) \
  X(v_cvt_pknorm_i16_f32, f, (norm_i(fa) & 0xffff) | norm_i(fb) << 16) X(v_cvt_pknorm_u16_f32, f, norm_u(fa) | norm_u(fb) << 16)
static inline u32 norm_i(float f) { f = f != f ? 0 : f > 1 ? 1 : f < -1 ? -1 : f; return (u32)(i32)rintf(f * 32767.0f); }
static inline u32 norm_u(float f) { f = f != f ? 0 : f > 1 ? 1 : f < 0 ? 0 : f; return (u32)rintf(f * 65535.0f); }
TWO_LIST(DEF_V2)
static void op_v_ldexp_f32(Wave *w, const Inst *i) {
  BEGIN2(f)
  for (int l = 0; l < LANES; l++) { i32 e = (i32)B[l]; STORE(as_u(ldexpf(as_f(A[l]), e < -300 ? -300 : e > 300 ? 300 : e))); }
}

#define THREE_LIST(X) \
  X(v_fma_f32, f, as_u(fmaf(fa, fb, fc))) X(v_fmamk_f32, f, as_u(fmaf(fa, fb, fc))) X(v_fmaak_f32, f, as_u(fmaf(fa, fb, fc))) \
  X(v_min3_f32, f, fmin_bits(fmin_bits(a, b), c)) X(v_max3_f32, f, fmax_bits(fmax_bits(a, b), c)) \
  X(v_med3_f32, f, fmed(a, b, c)) X(v_minimum3_f32, f, nan_or(a, b, c, fmin_bits(fmin_bits(a, b), c))) \
  X(v_maximum3_f32, f, nan_or(a, b, c, fmax_bits(fmax_bits(a, b), c))) \
  X(v_cvt_pk_u8_f32, i, pack_u8(as_f(a), b, c))
static inline u32 pack_u8(float x, u32 at, u32 old) {
  u32 k = 8 * (at & 3), v = x != x || x <= 0 ? 0 : x >= 255 ? 255 : (u32)rintf(x);
  return (old & ~(255u << k)) | v << k;
}
THREE_LIST(DEF_V3)

/* Division: div_scale keeps its operand and div_fmas is a plain fma, so div_fixup alone makes the correctly rounded quotient. */
static void op_v_div_scale_f32(Wave *w, const Inst *i) {
  BEGIN1(f)
  FOR_LANES STORE(A[l]);
  set_pair(&w->s[i->sdst.idx], 0);
}
static void op_v_div_scale_f64(Wave *w, const Inst *i) {
  Wide x;
  wide_source(w, i, 0, x.a, 1);
  wide_result(w, i, x.a);
  set_pair(&w->s[i->sdst.idx], 0);
}
#define FIX_LIST(X) X(v_div_fmas_f32, f, as_u(fmaf(fa, fb, fc))) X(v_div_fixup_f32, f, as_u(fc / fb))
FIX_LIST(DEF_V3)

/* Double precision. */
static inline u64 dmax_bits(u64 a, u64 b) { double x = as_d(a), y = as_d(b); return x != x ? b : y != y ? a : x == y ? a & b : x > y ? a : b; }
static inline u64 dmin_bits(u64 a, u64 b) { double x = as_d(a), y = as_d(b); return x != x ? b : y != y ? a : x == y ? a | b : x < y ? a : b; }
static inline double dfract(double f) { double r = f - floor(f); return r < 1.0 ? r : 0x1.fffffffffffffp-1; }
static inline double dmant(double f) { int e; return f != f || f - f != 0 ? f : frexp(f, &e); }
#define DOUBLE_LIST(X) \
  X(v_add_f64, 2, a + b) X(v_mul_f64, 2, a * b) X(v_fma_f64, 3, fma(a, b, c)) X(v_div_fmas_f64, 3, fma(a, b, c)) X(v_div_fixup_f64, 3, c / b) \
  X(v_trunc_f64, 1, trunc(a)) X(v_ceil_f64, 1, ceil(a)) X(v_rndne_f64, 1, rint(a)) X(v_floor_f64, 1, floor(a)) X(v_rcp_f64, 1, 1.0 / a) \
  X(v_rsq_f64, 1, 1.0 / sqrt(a)) X(v_sqrt_f64, 1, sqrt(a)) X(v_fract_f64, 1, dfract(a)) X(v_frexp_mant_f64, 1, dmant(a)) \
  X(v_min_f64, 2, as_d(dmin_bits(x.a[l], x.b[l]))) X(v_max_f64, 2, as_d(dmax_bits(x.a[l], x.b[l]))) \
  X(v_ldexp_f64, 2, ldexp(a, (int)(i32)(u32)x.b[l]))
#define DEF_DOUBLE(name, n, e) static void op_##name(Wave *w, const Inst *i) { Wide x; unsigned old = denormals_on(); \
  wide_source(w, i, 0, x.a, 1); if (n > 1) wide_source(w, i, 1, x.b, 1); if (n > 2) wide_source(w, i, 2, x.c, 1); \
  for (int l = 0; l < LANES; l++) { double a = as_d(x.a[l]), b = n > 1 ? as_d(x.b[l]) : 0, c = n > 2 ? as_d(x.c[l]) : 0; \
    (void)a; (void)b; (void)c; x.r[l] = as_q(e); } \
  wide_result(w, i, x.r); denormals_back(old); }
DOUBLE_LIST(DEF_DOUBLE)
static void op_v_fmac_f64(Wave *w, const Inst *i) {
  Wide x;
  unsigned old = denormals_on();
  wide_source(w, i, 0, x.a, 1);
  wide_source(w, i, 1, x.b, 1);
  u32 *lo = w->v[i->dst.idx], *hi = w->v[i->dst.idx + 1];
  for (int l = 0; l < LANES; l++) x.r[l] = as_q(fma(as_d(x.a[l]), as_d(x.b[l]), as_d(lo[l] | (u64)hi[l] << 32)));
  wide_result(w, i, x.r);
  denormals_back(old);
}
#define TO64_LIST(X) X(v_cvt_f64_i32, i, (double)(i32)a) X(v_cvt_f64_u32, i, (double)a) X(v_cvt_f64_f32, f, (double)as_f(a))
#define DEF_TO64(name, kind, e) static void op_##name(Wave *w, const Inst *i) { Wide x; u32 t00[LANES]; const u32 *A = ROW(0, 0, kind); \
  unsigned old = denormals_on(); for (int l = 0; l < LANES; l++) { u32 a = A[l]; x.r[l] = as_q(e); } wide_result(w, i, x.r); denormals_back(old); }
TO64_LIST(DEF_TO64)
static inline u32 d_to_i32(double f) { return f != f ? 0 : f >= 2147483648.0 ? 0x7fffffffu : f <= -2147483649.0 ? 0x80000000u : (u32)(i32)f; }
static inline u32 d_to_u32(double f) { return f != f || f <= 0 ? 0 : f >= 4294967296.0 ? ~0u : (u32)f; }
static inline u32 d_exp(double f) { int e; if (f == 0 || f != f || f - f != 0) return 0; frexp(f, &e); return (u32)e; }
#define FROM64_LIST(X) X(v_cvt_i32_f64, d_to_i32(a)) X(v_cvt_u32_f64, d_to_u32(a)) X(v_cvt_f32_f64, as_u((float)a)) X(v_frexp_exp_i32_f64, d_exp(a))
#define DEF_FROM64(name, e) static void op_##name(Wave *w, const Inst *i) { Wide x; wide_source(w, i, 0, x.a, 1); \
  unsigned old = denormals_on(); const u32 *m = lanes_of(w); u32 *D = w->v[i->dst.idx]; \
  for (int l = 0; l < LANES; l++) { double a = as_d(x.a[l]); STORE(e); } denormals_back(old); }
FROM64_LIST(DEF_FROM64)

/* Segments of 2/pi for the reduction of large angles: 53 bits from bit 53 * (src1 & 31) on, farther for large exponents. */
static const u32 TWO_OVER_PI[38] = {0xa2f9836e, 0x4e441529, 0xfc2757d1, 0xf534ddc0, 0xdb629599, 0x3c439041, 0xfe5163ab, 0xdebbc561, 0xb7246e3a, 0x424dd2e0,
  0x06492eea, 0x09d1921c, 0xfe1deb1c, 0xb129a73e, 0xe88235f5, 0x2ebb4484, 0xe99c7026, 0xb45f7e41, 0x3991d639, 0x835339f4,
  0x9c845f8b, 0xbdf9283b, 0x1ff897ff, 0xde05980f, 0xef2f118b, 0x5a0a6d1f, 0x6d367ecf, 0x27cb09b7, 0x4f463f66, 0x9e5fea2d,
  0x7527bac7, 0xebe5f17b, 0x3d0739f7, 0x8a5292ea, 0x6bfb5fb1, 0x1f8d5d08, 0x56033046, 0xfc7b6bab};
static void op_v_trig_preop_f64(Wave *w, const Inst *i) {
  Wide x;
  u32 t[LANES];
  wide_source(w, i, 0, x.a, 1);
  const u32 *segment = source_row(w, i, 1, 0, t, 0);
  for (int l = 0; l < LANES; l++) {
    int exponent = (int)(x.a[l] >> 52 & 2047), shift = 53 * (int)(segment[l] & 31) + (exponent > 1077 ? exponent - 1077 : 0);
    u64 bits = 0;
    for (int k = shift; k < shift + 53; k++) bits = bits << 1 | (k < 1201 ? TWO_OVER_PI[k / 32] >> (31 - k % 32) & 1 : 0);
    x.r[l] = as_q(ldexp((double)bits, -53 - shift + (exponent >= 1968 ? 128 : 0)));
  }
  wide_result(w, i, x.r);
}

const OpEntry valu_float_ops[] = {
  ONE_LIST(ENTRY) TWO_LIST(ENTRY) THREE_LIST(ENTRY) FIX_LIST(ENTRY) DOUBLE_LIST(ENTRY) TO64_LIST(ENTRY) FROM64_LIST(ENTRY)
  ENTRY(v_ldexp_f32) ENTRY(v_div_scale_f32) ENTRY(v_div_scale_f64) ENTRY(v_fmac_f64) ENTRY(v_trig_preop_f64) {0, 0}};
