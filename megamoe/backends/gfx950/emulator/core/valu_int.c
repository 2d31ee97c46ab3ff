/* Integer and bit operations of the vector unit, 16, 32 and 64 bits. */
#include "valu.h"

static inline i32 s24(u32 x) { return (i32)(x << 8) >> 8; }
static inline u32 u24(u32 x) { return x & 0xffffff; }
static inline u32 sat(i64 x, i64 low, i64 high) { return (u32)(x < low ? low : x > high ? high : x); }
static inline u32 bits_reversed(u32 x) {
  x = (x >> 1 & 0x55555555) | (x & 0x55555555) << 1;
  x = (x >> 2 & 0x33333333) | (x & 0x33333333) << 2;
  x = (x >> 4 & 0x0f0f0f0f) | (x & 0x0f0f0f0f) << 4;
  return __builtin_bswap32(x);
}
static inline u32 ffbh_i(u32 x) { u32 y = (i32)x < 0 ? ~x : x; return y ? (u32)__builtin_clz(y) : ~0u; }
static inline u32 min_u(u32 a, u32 b) { return a < b ? a : b; }
static inline u32 max_u(u32 a, u32 b) { return a > b ? a : b; }
static inline i32 min_i(i32 a, i32 b) { return a < b ? a : b; }
static inline i32 max_i(i32 a, i32 b) { return a > b ? a : b; }
static inline u32 sad8(u32 a, u32 b) {
  u32 r = 0;
  for (int k = 0; k < 32; k += 8) { i32 d = (i32)(a >> k & 255) - (i32)(b >> k & 255); r += (u32)(d < 0 ? -d : d); }
  return r;
}
static inline u32 perm(u32 a, u32 b, u32 sel) {
  u64 data = (u64)a << 32 | b;
  u32 r = 0;
  for (int k = 0; k < 4; k++) {
    u32 s = sel >> 8 * k & 255, byte;
    if (s < 8) byte = (u32)(data >> 8 * s) & 255;
    else if (s < 12) byte = data >> (16 * (s - 8) + 15) & 1 ? 255 : 0;
    else byte = s == 12 ? 0 : 255;
    r |= byte << 8 * k;
  }
  return r;
}

#define ONE_LIST(X) \
  X(v_mov_b32, i, a) X(v_not_b32, i, ~a) X(v_bfrev_b32, i, bits_reversed(a)) \
  X(v_ffbh_u32, i, a ? (u32)__builtin_clz(a) : ~0u) X(v_ffbl_b32, i, a ? (u32)__builtin_ctz(a) : ~0u) X(v_ffbh_i32, i, ffbh_i(a)) \
  X(v_accvgpr_read_b32, i, a) X(v_accvgpr_write_b32, i, a) X(v_accvgpr_mov_b32, i, a) \
  X(v_prng_b32, i, (a << 1) ^ (a >> 31 ? 0x000000c5u : 0)) \
  X(v_sat_pk_u8_i16, i, sat((int16_t)a, 0, 255) | sat((int16_t)(a >> 16), 0, 255) << 8)
ONE_LIST(DEF_V1)

#define TWO_LIST(X) \
  X(v_add_u32, i, i->clamp && a + b < a ? ~0u : a + b) X(v_sub_u32, i, i->clamp && a < b ? 0 : a - b) X(v_subrev_u32, i, i->clamp && b < a ? 0 : b - a) X(v_and_b32, i, a & b) X(v_or_b32, i, a | b) \
  X(v_xor_b32, i, a ^ b) X(v_xnor_b32, i, ~(a ^ b)) X(v_lshlrev_b32, i, b << (a & 31)) X(v_lshrrev_b32, i, b >> (a & 31)) \
  X(v_ashrrev_i32, i, (u32)((i32)b >> (a & 31))) X(v_mul_lo_u32, i, a * b) X(v_mul_hi_u32, i, (u32)((u64)a * b >> 32)) \
  X(v_mul_hi_i32, i, (u32)((i64)(i32)a * (i32)b >> 32)) X(v_mul_u32_u24, i, u24(a) * u24(b)) X(v_mul_i32_i24, i, (u32)(s24(a) * s24(b))) \
  X(v_mul_hi_u32_u24, i, (u32)((u64)u24(a) * u24(b) >> 32)) X(v_mul_hi_i32_i24, i, (u32)((i64)s24(a) * s24(b) >> 32)) \
  X(v_min_u32, i, min_u(a, b)) X(v_max_u32, i, max_u(a, b)) X(v_min_i32, i, (u32)min_i((i32)a, (i32)b)) X(v_max_i32, i, (u32)max_i((i32)a, (i32)b)) \
  X(v_add_i32, i, i->clamp ? sat((i64)(i32)a + (i32)b, INT32_MIN, INT32_MAX) : a + b) \
  X(v_sub_i32, i, i->clamp ? sat((i64)(i32)a - (i32)b, INT32_MIN, INT32_MAX) : a - b) \
  X(v_bcnt_u32_b32, i, (u32)__builtin_popcount(a) + b) X(v_bfm_b32, i, ((1u << (a & 31)) - 1) << (b & 31)) \
  X(v_mbcnt_lo_u32_b32, i, (u32)__builtin_popcount(a & (l >= 32 ? ~0u : (1u << (l & 31)) - 1)) + b) \
  X(v_mbcnt_hi_u32_b32, i, (u32)__builtin_popcount(a & (l < 32 ? 0 : (1u << (l & 31)) - 1)) + b) \
  X(v_cvt_pk_u16_u32, i, min_u(a, 0xffff) | min_u(b, 0xffff) << 16) \
  X(v_cvt_pk_i16_i32, i, (sat((i32)a, -32768, 32767) & 0xffff) | sat((i32)b, -32768, 32767) << 16) \
  X(v_add_u16, i, i->clamp ? sat((i64)(a & 0xffff) + (b & 0xffff), 0, 65535) : (a + b) & 0xffff) X(v_sub_u16, i, i->clamp ? sat((i64)(a & 0xffff) - (b & 0xffff), 0, 65535) : (a - b) & 0xffff) \
  X(v_subrev_u16, i, i->clamp ? sat((i64)(b & 0xffff) - (a & 0xffff), 0, 65535) : (b - a) & 0xffff) X(v_mul_lo_u16, i, (a * b) & 0xffff) \
  X(v_add_i16, i, (i->clamp ? sat((i64)(int16_t)a + (int16_t)b, -32768, 32767) : a + b) & 0xffff) X(v_sub_i16, i, (i->clamp ? sat((i64)(int16_t)a - (int16_t)b, -32768, 32767) : a - b) & 0xffff) \
  X(v_lshlrev_b16, i, (b << (a & 15)) & 0xffff) X(v_lshrrev_b16, i, (b & 0xffff) >> (a & 15)) \
  X(v_ashrrev_i16, i, (u32)((int16_t)b >> (a & 15)) & 0xffff) X(v_max_u16, i, max_u(a & 0xffff, b & 0xffff)) X(v_min_u16, i, min_u(a & 0xffff, b & 0xffff)) \
  X(v_max_i16, i, (u32)max_i((int16_t)a, (int16_t)b) & 0xffff) X(v_min_i16, i, (u32)min_i((int16_t)a, (int16_t)b) & 0xffff)
TWO_LIST(DEF_V2)

static inline u32 bfe_u(u32 a, u32 b, u32 c) { u32 n = c & 31; return n ? (a >> (b & 31)) & ((1u << n) - 1) : 0; }
static inline u32 bfe_s(u32 a, u32 b, u32 c) {
  u32 n = c & 31, x = (u32)((i32)a >> (b & 31));
  return n ? (u32)((i32)(x << (32 - n)) >> (32 - n)) : 0;
}
static inline u32 med_u(u32 a, u32 b, u32 c) { return max_u(min_u(a, b), min_u(max_u(a, b), c)); }
static inline i32 med_i(i32 a, i32 b, i32 c) { return max_i(min_i(a, b), min_i(max_i(a, b), c)); }
static inline u32 bitop(u32 t, u32 a, u32 b, u32 c) {
  u32 r = 0;
  for (int k = 0; k < 8; k++)
    if (t >> k & 1) r |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
  return r;
}
static inline u32 msad(u32 a, u32 b, u32 c) { /* bytes that are zero in the reference do not count */
  for (int k = 0; k < 32; k += 8) if (b >> k & 255) { i32 d = (i32)(a >> k & 255) - (i32)(b >> k & 255); c += (u32)(d < 0 ? -d : d); }
  return c;
}
#define L16(x) ((x) & 0xffff)
#define KEEP16(x) (((x) & 0xffff) | (D[l] & 0xffff0000))
#define THREE_LIST(X) \
  X(v_add3_u32, i, a + b + c) X(v_add_lshl_u32, i, (a + b) << (c & 31)) X(v_lshl_add_u32, i, (a << (b & 31)) + c) \
  X(v_lshl_or_b32, i, (a << (b & 31)) | c) X(v_and_or_b32, i, (a & b) | c) X(v_or3_b32, i, a | b | c) X(v_xad_u32, i, (a ^ b) + c) \
  X(v_bfe_u32, i, bfe_u(a, b, c)) X(v_bfe_i32, i, bfe_s(a, b, c)) X(v_bfi_b32, i, (a & b) | (~a & c)) X(v_perm_b32, i, perm(a, b, c)) \
  X(v_alignbit_b32, i, (u32)(((u64)a << 32 | b) >> (c & 31))) X(v_alignbyte_b32, i, (u32)(((u64)a << 32 | b) >> 8 * (c & 3))) \
  X(v_mad_u32_u24, i, u24(a) * u24(b) + c) X(v_mad_i32_i24, i, (u32)(s24(a) * s24(b)) + c) \
  X(v_min3_i32, i, (u32)min_i(min_i((i32)a, (i32)b), (i32)c)) X(v_max3_i32, i, (u32)max_i(max_i((i32)a, (i32)b), (i32)c)) \
  X(v_min3_u32, i, min_u(min_u(a, b), c)) X(v_max3_u32, i, max_u(max_u(a, b), c)) \
  X(v_med3_i32, i, (u32)med_i((i32)a, (i32)b, (i32)c)) X(v_med3_u32, i, med_u(a, b, c)) \
  X(v_min3_u16, i, min_u(min_u(L16(a), L16(b)), L16(c))) X(v_max3_u16, i, max_u(max_u(L16(a), L16(b)), L16(c))) X(v_med3_u16, i, med_u(L16(a), L16(b), L16(c))) \
  X(v_min3_i16, i, (u32)min_i(min_i((int16_t)a, (int16_t)b), (int16_t)c) & 0xffff) X(v_max3_i16, i, (u32)max_i(max_i((int16_t)a, (int16_t)b), (int16_t)c) & 0xffff) \
  X(v_med3_i16, i, (u32)med_i((int16_t)a, (int16_t)b, (int16_t)c) & 0xffff) \
  X(v_sad_u8, i, sad8(a, b) + c) X(v_sad_hi_u8, i, (sad8(a, b) << 16) + c) X(v_sad_u32, i, (a > b ? a - b : b - a) + c) \
  X(v_sad_u16, i, (L16(a) > L16(b) ? L16(a) - L16(b) : L16(b) - L16(a)) + ((a >> 16) > (b >> 16) ? (a >> 16) - (b >> 16) : (b >> 16) - (a >> 16)) + c) \
  X(v_lerp_u8, i, lerp(a, b, c)) X(v_bitop3_b32, i, bitop(i->bitop3, a, b, c)) X(v_bitop3_b16, i, L16(bitop(i->bitop3, a, b, c))) \
  X(v_mad_u32_u16, i, L16(a) * L16(b) + c) X(v_mad_i32_i16, i, (u32)((int16_t)a * (int16_t)b) + c) \
  X(v_mad_u16, i, KEEP16(a * b + c)) X(v_mad_i16, i, KEEP16(a * b + c)) X(v_mad_legacy_u16, i, L16(a * b + c)) X(v_mad_legacy_i16, i, L16(a * b + c)) X(v_msad_u8, i, msad(a, b, c)) \
  X(v_ashr_pk_i8_i32, i, (sat((i32)a >> (c & 31), -128, 127) & 255) | (sat((i32)b >> (c & 31), -128, 127) & 255) << 8) \
  X(v_ashr_pk_u8_i32, i, sat((i32)a >> (c & 31), 0, 255) | sat((i32)b >> (c & 31), 0, 255) << 8)
static inline u32 lerp(u32 a, u32 b, u32 c) {
  u32 r = 0;
  for (int k = 0; k < 32; k += 8) r |= (((a >> k & 255) + (b >> k & 255) + (c >> k & 1)) >> 1) << k;
  return r;
}
THREE_LIST(DEF_V3)

/* Carry chains: the carry goes to and comes from one bit a lane. */
#define CARRY_LIST(X) \
  X(v_add_co_u32, 0, a + b, (a + b) >> 32) X(v_addc_co_u32, 1, a + b + k, (a + b + k) >> 32) X(v_sub_co_u32, 0, a - b, a < b) \
  X(v_subb_co_u32, 1, a - b - k, a < b + k) X(v_subrev_co_u32, 0, b - a, b < a) X(v_subbrev_co_u32, 1, b - a - k, b < a + k)
#define DEF_CARRY(name, in, value, carry) static void op_##name(Wave *w, const Inst *i) { BEGIN2(i) \
  u64 cin = in ? sread64(w, &i->src[2]) : 0, out = 0, e = exec_of(w); \
  for (int l = 0; l < LANES; l++) { u64 a = A[l], b = B[l], k = cin >> l & 1; (void)k; out |= (u64)((carry) != 0) << l; STORE((u32)(value)); } \
  set_pair(&w->s[i->sdst.idx], out & e); }
CARRY_LIST(DEF_CARRY)

static void op_v_cndmask_b32(Wave *w, const Inst *i) {
  BEGIN2(f)
  u64 k = sread64(w, &i->src[2]);
  u32 pick[LANES];
  for (int l = 0; l < LANES; l++) pick[l] = -(u32)(k >> l & 1);
  FOR_LANES STORE((A[l] & ~pick[l]) | (B[l] & pick[l]));
}
static void op_v_swap_b32(Wave *w, const Inst *i) {
  u32 *x = w->v[i->dst.idx], *y = w->v[i->src[0].idx];
  u64 e = exec_of(w);
  for (int l = 0; l < LANES; l++) if (e >> l & 1) { u32 t = x[l]; x[l] = y[l]; y[l] = t; }
}

/* 64-bit integers. */
#define WIDE_LIST(X) \
  X(v_lshlrev_b64, 2, qb << (qa & 63)) X(v_lshrrev_b64, 2, qb >> (qa & 63)) X(v_ashrrev_i64, 2, (u64)((i64)qb >> (qa & 63))) \
  X(v_lshl_add_u64, 3, (qa << (qb & 7)) + qc) X(v_mov_b64, 1, qa)
#define DEF_WIDE(name, n, e) static void op_##name(Wave *w, const Inst *i) { Wide x; \
  wide_source(w, i, 0, x.a, 0); if (n > 1) wide_source(w, i, 1, x.b, 0); if (n > 2) wide_source(w, i, 2, x.c, 0); \
  for (int l = 0; l < LANES; l++) { u64 qa = x.a[l], qb = n > 1 ? x.b[l] : 0, qc = n > 2 ? x.c[l] : 0; (void)qa; (void)qb; (void)qc; x.r[l] = (e); } \
  wide_result(w, i, x.r); }
WIDE_LIST(DEF_WIDE)
#define MAD64_LIST(X) \
  X(v_mad_u64_u32, (u64)A[l] * B[l], r < x.c[l]) X(v_mad_i64_i32, (u64)((i64)(i32)A[l] * (i32)B[l]), (((i64)p ^ (i64)r) & ((i64)x.c[l] ^ (i64)r)) < 0)
#define DEF_MAD64(name, product, overflow) static void op_##name(Wave *w, const Inst *i) { Wide x; u32 t00[LANES], t10[LANES]; \
  const u32 *A = ROW(0, 0, i), *B = ROW(1, 0, i); u64 out = 0; wide_source(w, i, 2, x.c, 0); \
  for (int l = 0; l < LANES; l++) { u64 p = (product), r = p + x.c[l]; (void)p; out |= (u64)(overflow) << l; x.r[l] = r; } \
  wide_result(w, i, x.r); set_pair(&w->s[i->sdst.idx], out & exec_of(w)); }
MAD64_LIST(DEF_MAD64)

/* Dot products of small integers. */
static inline i32 dot_s(u32 a, u32 b, int bits) {
  i32 r = 0;
  for (int k = 0; k < 32; k += bits) r += ((i32)(a << (32 - bits - k)) >> (32 - bits)) * ((i32)(b << (32 - bits - k)) >> (32 - bits));
  return r;
}
static inline u32 dot_u(u32 a, u32 b, int bits) {
  u32 r = 0, mask = (1u << bits) - 1;
  for (int k = 0; k < 32; k += bits) r += (a >> k & mask) * (b >> k & mask);
  return r;
}
#define DOT_LIST(X) \
  X(v_dot2_i32_i16, i, (u32)dot_s(a, b, 16) + c) X(v_dot2_u32_u16, i, dot_u(a, b, 16) + c) X(v_dot4_i32_i8, i, (u32)dot_s(a, b, 8) + c) \
  X(v_dot4_u32_u8, i, dot_u(a, b, 8) + c) X(v_dot8_i32_i4, i, (u32)dot_s(a, b, 4) + c) X(v_dot8_u32_u4, i, dot_u(a, b, 4) + c)
DOT_LIST(DEF_V3)
#define DOTC_LIST(X) X(v_dot4c_i32_i8, i, (u32)dot_s(a, b, 8) + D[l]) X(v_dot8c_i32_i4, i, (u32)dot_s(a, b, 4) + D[l]) X(v_dot2c_i32_i16, i, (u32)dot_s(a, b, 16) + D[l])
DOTC_LIST(DEF_V2)
/* Four sums of absolute differences at the four byte offsets of a window of eight bytes. */
static void window_sums(Wave *w, const Inst *i, int masked, int wide) {
  u32 t[LANES], r[4][LANES];
  u64 window[LANES];
  const u32 *ref = source_row(w, i, 1, 0, t, 0);
  wide_source(w, i, 0, window, 0);
  for (int l = 0; l < LANES; l++) {
    u32 s[4];
    for (int k = 0; k < 4; k++) {
      u32 x = (u32)(window[l] >> 8 * k), add = wide ? w->v[i->src[2].idx + k][l] : w->v[i->src[2].idx + k / 2][l] >> 16 * (k & 1) & 0xffff;
      s[k] = masked ? msad(x, ref[l], add) : sad8(x, ref[l]) + add;
    }
    for (int k = 0; k < 4; k++) r[k][l] = wide ? s[k] : k < 2 ? (s[2 * k] & 0xffff) | s[2 * k + 1] << 16 : 0;
  }
  for (int k = 0; k < (wide ? 4 : 2); k++) merge_row(w, w->v[i->dst.idx + k], r[k]);
}
static void op_v_qsad_pk_u16_u8(Wave *w, const Inst *i) { window_sums(w, i, 0, 0); }
static void op_v_mqsad_pk_u16_u8(Wave *w, const Inst *i) { window_sums(w, i, 1, 0); }
static void op_v_mqsad_u32_u8(Wave *w, const Inst *i) { window_sums(w, i, 1, 1); }
static void op_v_nop(Wave *w, const Inst *i) { (void)w; (void)i; }

const OpEntry valu_int_ops[] = {
  ONE_LIST(ENTRY) TWO_LIST(ENTRY) THREE_LIST(ENTRY) CARRY_LIST(ENTRY) WIDE_LIST(ENTRY) MAD64_LIST(ENTRY) DOT_LIST(ENTRY) DOTC_LIST(ENTRY)
  ENTRY(v_cndmask_b32) ENTRY(v_swap_b32) ENTRY(v_qsad_pk_u16_u8) ENTRY(v_mqsad_pk_u16_u8) ENTRY(v_mqsad_u32_u8) ENTRY(v_nop) {"v_clrexcp", op_v_nop}, {0, 0}};
