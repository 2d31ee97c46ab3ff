/* Formats of eight bits and fewer, as targets: E4M3 (fp8), E5M2 (bf8), E2M1 (fp4), E2M3 (fp6), E3M2 (bf6). */
#pragma once
#include "valu.h"

/* emin: exponent of the smallest normal number. most: code of the largest finite number. over: code of what is larger,
 * unless MODE.FP16_OVFL asks for the largest number there too. nan: code of not-a-number, where there is one. */
typedef struct { int exponent, mantissa, emin; u32 most, over, nan; } Small;
static const Small FP8 = {4, 3, -6, 0x7e, 0x7f, 0x7f}, BF8 = {5, 2, -14, 0x7b, 0x7c, 0x7e}, FP4 = {2, 1, 0, 7, 7, 7}, FP6 = {2, 3, 0, 0x1f, 0x1f, 0x1f}, BF6 = {3, 2, -2, 0x1f, 0x1f, 0x1f};
static const Small F16 = {5, 10, -14, 0x7bff, 0x7c00, 0x7e00}, BF16 = {8, 7, -126, 0x7f7f, 0x7f80, 0x7fc0};

static inline u32 largest(const Wave *w, const Small *t) { return w->mode >> 23 & 1 ? t->most : t->over; }
/* Round to nearest even. */
static inline u32 rounded(const Wave *w, double x, const Small *t) {
  u32 sign = (signbit(x) ? 1u : 0u) << (t->exponent + t->mantissa);
  double a = fabs(x);
  int e;
  if (x != x) return sign | t->nan;
  if (isinf(x)) return sign | t->over;
  frexp(a, &e);
  e = a == 0 || e - 1 < t->emin ? t->emin : e - 1;
  double q = rint(ldexp(a, t->mantissa - e));
  u64 code = ((u64)(e - t->emin) << t->mantissa) + (u64)q; /* the leading one of q counts as one exponent more */
  return sign | (code > t->most ? largest(w, t) : (u32)code);
}
/* A source number taken apart: a significand with `bits` bits after the point, times 2^exponent. */
typedef struct { u32 sign, significand; int exponent, bits, is_nan, is_inf; } Parts;
static inline Parts parts_of(u32 x, const Small *f) {
  u32 field = x >> f->mantissa & ((1u << f->exponent) - 1), fraction = x & ((1u << f->mantissa) - 1), top = (1u << f->exponent) - 1;
  return (Parts){x >> (f->exponent + f->mantissa) & 1, field ? fraction | 1u << f->mantissa : fraction, field ? (int)field - 1 + f->emin : f->emin, f->mantissa, field == top && fraction, field == top && !fraction};
}
static const Small F32 = {8, 23, -126, 0x7f7fffff, 0x7f800000, 0x7fc00000};
/* Stochastic: align to the target's exponent, dropping what falls out; add the seed's top bits below the kept mantissa; cut. */
static inline u32 stochastic(const Wave *w, u32 x, const Small *from, u32 seed, int scale, const Small *t) {
  Parts p = parts_of(x, from);
  u32 sign = p.sign << (t->exponent + t->mantissa);
  if (p.is_nan) return sign | t->nan;
  if (p.is_inf) return sign | t->over;
  if (!p.significand) return sign;
  if (scale) while (!(p.significand >> p.bits)) { p.significand <<= 1; p.exponent--; }
  int e = p.exponent - scale, below = t->emin - e, dropped = p.bits - t->mantissa;
  if (below > 0) { p.significand = below > 31 ? 0 : p.significand >> below; e = t->emin; }
  u64 code = (p.significand + (seed >> (32 - dropped))) >> dropped;
  code += (u64)(e - t->emin) << t->mantissa;
  return sign | (code > t->most ? largest(w, t) : (u32)code);
}
static inline double divided(double x, double scale) { return scale != scale ? copysign(scale, x) : x / scale; }
static inline double scale_of(u32 s) { return (s >> 23 & 255) == 255 ? NAN : ldexp(1.0, (int)(s >> 23 & 255) - 127); }
