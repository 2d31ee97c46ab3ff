/* Macros that turn one expression over lane values into a handler. */
#pragma once
#include "emu.h"

#define SIGN_f 0x80000000u
#define SIGN_i 0u
#define ROW(k, half, kind) source_row(w, i, k, half, t##k##half, SIGN_##kind)
#define BEGIN1(kind) u32 t00[LANES]; const u32 *A = ROW(0, 0, kind); const u32 *m = lanes_of(w); u32 *D = w->v[i->dst.idx];
#define BEGIN2(kind) u32 t00[LANES], t10[LANES]; const u32 *A = ROW(0, 0, kind), *B = ROW(1, 0, kind); \
  const u32 *m = lanes_of(w); u32 *D = w->v[i->dst.idx];
#define BEGIN3(kind) u32 t00[LANES], t10[LANES], t20[LANES]; const u32 *A = ROW(0, 0, kind), *B = ROW(1, 0, kind), *C = ROW(2, 0, kind); \
  const u32 *m = lanes_of(w); u32 *D = w->v[i->dst.idx];
#define STORE(value) do { u32 r_ = (value); D[l] = (D[l] & ~m[l]) | (r_ & m[l]); } while (0)

/* X(name, kind, expression of a, b, c): words; with the names fa, fb, fc as floats. */
#define DEF_V1(name, kind, e) static void op_##name(Wave *w, const Inst *i) { BEGIN1(kind) \
  FOR_LANES { u32 a = A[l]; float fa = as_f(a); (void)fa; STORE(e); } }
#define DEF_V2(name, kind, e) static void op_##name(Wave *w, const Inst *i) { BEGIN2(kind) \
  FOR_LANES { u32 a = A[l], b = B[l]; float fa = as_f(a), fb = as_f(b); (void)fa; (void)fb; STORE(e); } }
#define DEF_V3(name, kind, e) static void op_##name(Wave *w, const Inst *i) { BEGIN3(kind) \
  FOR_LANES { u32 a = A[l], b = B[l], c = C[l]; float fa = as_f(a), fb = as_f(b), fc = as_f(c); (void)fa; (void)fb; (void)fc; STORE(e); } }

/* 64-bit operands as u64 qa, qb, qc; `n` sources of which those in `wide` (bit mask) have two dwords. */
typedef struct { u64 a[LANES], b[LANES], c[LANES], r[LANES]; } Wide;
static inline void wide_source(Wave *w, const Inst *i, int k, u64 *out, int is_float) {
  u32 tl[LANES], th[LANES];
  const u32 *lo = source_row(w, i, k, 0, tl, 0);
  if (i->src[k].width < 2) { for (int l = 0; l < LANES; l++) out[l] = lo[l]; return; }
  const u32 *hi = source_row(w, i, k, 1, th, is_float ? 0x80000000u : 0);
  for (int l = 0; l < LANES; l++) out[l] = lo[l] | (u64)hi[l] << 32;
}
static inline void wide_result(Wave *w, const Inst *i, const u64 *r) {
  const u32 *m = lanes_of(w);
  u32 *D = w->v[i->dst.idx], *E = w->v[i->dst.idx + 1];
  FOR_LANES {
    D[l] = (D[l] & ~m[l]) | ((u32)r[l] & m[l]);
    E[l] = (E[l] & ~m[l]) | ((u32)(r[l] >> 32) & m[l]);
  }
}

/* Denormals are kept in double and half precision and inside matrix instructions, whatever the single mode says. */
#if defined(__x86_64__)
#include <xmmintrin.h>
static inline unsigned denormals_on(void) { unsigned old = _mm_getcsr(); _mm_setcsr(old & ~0x8040u); return old; }
static inline void denormals_back(unsigned old) { _mm_setcsr(old); }
static inline unsigned denormals_set(int flush) {
  unsigned old = _mm_getcsr();
  _mm_setcsr(flush ? old | 0x8040u : old & ~0x8040u);
  return old;
}
#else
static inline unsigned denormals_on(void) { return 0; }
static inline void denormals_back(unsigned old) { (void)old; }
static inline unsigned denormals_set(int flush) { (void)flush; return 0; }
#endif
