/* Scalar arithmetic, comparisons and loads: what a wave does once, not per lane. */
#include "scalar.h"

/* name, result, SCC after it */
#define SOP2_LIST(X) \
  X(s_add_u32, x + y, r < x) X(s_sub_u32, x - y, x < y) \
  X(s_add_i32, x + y, ((x ^ r) & (y ^ r)) >> 31) X(s_sub_i32, x - y, ((x ^ y) & (x ^ r)) >> 31) \
  X(s_addc_u32, x + y + w->scc, ((u64)x + y + w->scc) >> 32) X(s_subb_u32, x - y - w->scc, (u64)x < (u64)y + w->scc) \
  X(s_min_i32, (i32)x < (i32)y ? x : y, (i32)x < (i32)y) X(s_max_i32, (i32)x > (i32)y ? x : y, (i32)x > (i32)y) \
  X(s_min_u32, x < y ? x : y, x < y) X(s_max_u32, x > y ? x : y, x > y) \
  X(s_and_b32, x & y, r != 0) X(s_or_b32, x | y, r != 0) X(s_xor_b32, x ^ y, r != 0) X(s_andn2_b32, x & ~y, r != 0) \
  X(s_orn2_b32, x | ~y, r != 0) X(s_nand_b32, ~(x & y), r != 0) X(s_nor_b32, ~(x | y), r != 0) X(s_xnor_b32, ~(x ^ y), r != 0) \
  X(s_lshl_b32, x << (y & 31), r != 0) X(s_lshr_b32, x >> (y & 31), r != 0) X(s_ashr_i32, (u32)((i32)x >> (y & 31)), r != 0) \
  X(s_bfe_u32, bfe_u(x, y & 31, y >> 16 & 127), r != 0) X(s_bfe_i32, (u32)bfe_i((i32)x, y & 31, y >> 16 & 127), r != 0) \
  X(s_absdiff_i32, (i32)x > (i32)y ? x - y : y - x, r != 0) \
  X(s_lshl1_add_u32, (x << 1) + y, (((u64)x << 1) + y) >> 32 != 0) X(s_lshl2_add_u32, (x << 2) + y, (((u64)x << 2) + y) >> 32 != 0) \
  X(s_lshl3_add_u32, (x << 3) + y, (((u64)x << 3) + y) >> 32 != 0) X(s_lshl4_add_u32, (x << 4) + y, (((u64)x << 4) + y) >> 32 != 0) \
  X(s_mul_i32, x * y, w->scc) X(s_mul_hi_u32, (u32)(((u64)x * y) >> 32), w->scc) \
  X(s_mul_hi_i32, (u32)(((i64)(i32)x * (i32)y) >> 32), w->scc) X(s_cselect_b32, w->scc ? x : y, w->scc) \
  X(s_bfm_b32, ((1u << (x & 31)) - 1) << (y & 31), w->scc) X(s_pack_ll_b32_b16, (x & 0xffff) | y << 16, w->scc) \
  X(s_pack_lh_b32_b16, (x & 0xffff) | (y & 0xffff0000), w->scc) X(s_pack_hh_b32_b16, x >> 16 | (y & 0xffff0000), w->scc)

static inline u32 bfe_u(u32 x, u32 at, u32 n) { return n == 0 ? 0 : n >= 32 ? x >> at : (x >> at) & ((1u << n) - 1); }
static inline i32 bfe_i(i32 x, u32 at, u32 n) {
  if (n == 0) return 0;
  x >>= at;
  return n >= 32 ? x : (i32)((u32)x << (32 - n)) >> (32 - n);
}
#define DEF_SOP2(name, value, carry) \
  static void op_##name(Wave *w, const Inst *i) { \
    u32 x = sread(w, &i->src[0]), y = sread(w, &i->src[1]), r = (value), c = (carry); \
    (void)x; (void)y; put(w, i, r); w->scc = c; }
SOP2_LIST(DEF_SOP2)

#define SOP2_64_LIST(X) \
  X(s_and_b64, x & y) X(s_or_b64, x | y) X(s_xor_b64, x ^ y) X(s_andn2_b64, x & ~y) X(s_orn2_b64, x | ~y) \
  X(s_nand_b64, ~(x & y)) X(s_nor_b64, ~(x | y)) X(s_xnor_b64, ~(x ^ y))
#define DEF_SOP2_64(name, value) \
  static void op_##name(Wave *w, const Inst *i) { \
    u64 x = sread64(w, &i->src[0]), y = sread64(w, &i->src[1]), r = (value); put64(w, i, r); w->scc = r != 0; }
SOP2_64_LIST(DEF_SOP2_64)

#define SHIFT64_LIST(X) \
  X(s_lshl_b64, x << (y & 63)) X(s_lshr_b64, x >> (y & 63)) X(s_ashr_i64, (u64)((i64)x >> (y & 63))) \
  X(s_bfe_u64, bfe64(x, y & 63, y >> 16 & 127, 0)) X(s_bfe_i64, bfe64(x, y & 63, y >> 16 & 127, 1))
static inline u64 bfe64(u64 x, u32 at, u32 n, int sign) {
  if (n == 0) return 0;
  if (sign) return n >= 64 ? (u64)((i64)x >> at) : (u64)((i64)((u64)((i64)x >> at) << (64 - n)) >> (64 - n));
  return n >= 64 ? x >> at : (x >> at) & (((u64)1 << n) - 1);
}
#define DEF_SHIFT64(name, value) \
  static void op_##name(Wave *w, const Inst *i) { \
    u64 x = sread64(w, &i->src[0]); u32 y = sread(w, &i->src[1]); u64 r = (value); put64(w, i, r); w->scc = r != 0; }
SHIFT64_LIST(DEF_SHIFT64)
static void op_s_cselect_b64(Wave *w, const Inst *i) { put64(w, i, sread64(w, &i->src[w->scc ? 0 : 1])); }
static void op_s_bfm_b64(Wave *w, const Inst *i) {
  put64(w, i, (((u64)1 << (sread(w, &i->src[0]) & 63)) - 1) << (sread(w, &i->src[1]) & 63));
}

/* name, dwords read, dwords written, result, SCC */
static inline u32 ctz64(u64 x) { return x ? (u32)__builtin_ctzll(x) : ~0u; }
static inline u32 rev32(u32 x) { u32 r = 0; for (int k = 0; k < 32; k++) r |= (x >> k & 1) << (31 - k); return r; }
static inline u32 sign_run(i64 x, int bits) {
  u64 y = (u64)(x < 0 ? ~x : x);
  return y ? (u32)(__builtin_clzll(y) - (64 - bits)) : ~0u;
}
static inline u64 quad(u64 x) { u64 r = 0; for (int k = 0; k < 16; k++) r |= (u64)((x >> 4 * k & 15) != 0) << k; return r; }
static inline u64 wqm(u64 x) { u64 r = 0; for (int k = 0; k < 16; k++) r |= (x >> 4 * k & 15 ? (u64)15 : 0) << 4 * k; return r; }
#define SOP1_LIST(X) \
  X(s_mov_b32, 32, 32, x, w->scc) X(s_mov_b64, 64, 64, x, w->scc) X(s_not_b32, 32, 32, ~x, (u32)r != 0) X(s_not_b64, 64, 64, ~x, r != 0) \
  X(s_wqm_b32, 32, 32, (u32)wqm(x), (u32)r != 0) X(s_wqm_b64, 64, 64, wqm(x), r != 0) \
  X(s_brev_b32, 32, 32, rev32((u32)x), w->scc) X(s_brev_b64, 64, 64, rev32((u32)(x >> 32)) | (u64)rev32((u32)x) << 32, w->scc) \
  X(s_bcnt0_i32_b32, 32, 32, (u32)(32 - __builtin_popcountll(x)), r != 0) X(s_bcnt1_i32_b32, 32, 32, (u32)__builtin_popcountll(x), r != 0) \
  X(s_bcnt0_i32_b64, 64, 32, (u32)(64 - __builtin_popcountll(x)), r != 0) X(s_bcnt1_i32_b64, 64, 32, (u32)__builtin_popcountll(x), r != 0) \
  X(s_ff0_i32_b32, 32, 32, (u32)ctz64(~x & 0xffffffffu), w->scc) X(s_ff1_i32_b32, 32, 32, ctz64(x), w->scc) \
  X(s_ff0_i32_b64, 64, 32, ctz64(~x), w->scc) X(s_ff1_i32_b64, 64, 32, ctz64(x), w->scc) \
  X(s_flbit_i32_b32, 32, 32, x ? (u32)__builtin_clz((u32)x) : ~0u, w->scc) X(s_flbit_i32_b64, 64, 32, x ? (u32)__builtin_clzll(x) : ~0u, w->scc) \
  X(s_flbit_i32, 32, 32, sign_run((i32)x, 32), w->scc) X(s_flbit_i32_i64, 64, 32, sign_run((i64)x, 64), w->scc) \
  X(s_sext_i32_i8, 32, 32, (u32)(i32)(int8_t)x, w->scc) X(s_sext_i32_i16, 32, 32, (u32)(i32)(int16_t)x, w->scc) \
  X(s_abs_i32, 32, 32, (i32)x < 0 ? 0u - (u32)x : (u32)x, (u32)r != 0) X(s_quadmask_b32, 32, 32, (u32)quad(x), r != 0) \
  X(s_quadmask_b64, 64, 64, quad(x), r != 0) \
  X(s_bitset0_b32, 32, 32, w->s[i->dst.idx] & ~(1u << (x & 31)), w->scc) X(s_bitset1_b32, 32, 32, w->s[i->dst.idx] | 1u << (x & 31), w->scc) \
  X(s_bitset0_b64, 32, 64, pair(&w->s[i->dst.idx]) & ~((u64)1 << (x & 63)), w->scc) X(s_bitset1_b64, 32, 64, pair(&w->s[i->dst.idx]) | (u64)1 << (x & 63), w->scc) \
  X(s_cmov_b32, 32, 32, w->scc ? x : w->s[i->dst.idx], w->scc) X(s_cmov_b64, 64, 64, w->scc ? x : pair(&w->s[i->dst.idx]), w->scc)
#define READ32 sread(w, &i->src[0])
#define READ64 sread64(w, &i->src[0])
#define WRITE32 put(w, i, (u32)r)
#define WRITE64 put64(w, i, r)
#define DEF_SOP1(name, in, out, value, carry) \
  static void op_##name(Wave *w, const Inst *i) { u64 x = READ##in, r = (value); u32 c = (carry); WRITE##out; w->scc = c; }
SOP1_LIST(DEF_SOP1)
static void op_s_bitreplicate_b64_b32(Wave *w, const Inst *i) {
  u32 x = sread(w, &i->src[0]); u64 r = 0;
  for (int k = 0; k < 32; k++) r |= (u64)(x >> k & 1 ? 3 : 0) << 2 * k;
  put64(w, i, r);
}

#define SAVEEXEC_LIST(X) \
  X(s_and_saveexec_b64, x & e) X(s_or_saveexec_b64, x | e) X(s_xor_saveexec_b64, x ^ e) X(s_andn2_saveexec_b64, x & ~e) \
  X(s_orn2_saveexec_b64, x | ~e) X(s_nand_saveexec_b64, ~(x & e)) X(s_nor_saveexec_b64, ~(x | e)) \
  X(s_xnor_saveexec_b64, ~(x ^ e)) X(s_andn1_saveexec_b64, ~x & e) X(s_orn1_saveexec_b64, ~x | e)
#define DEF_SAVEEXEC(name, value) \
  static void op_##name(Wave *w, const Inst *i) { \
    u64 x = sread64(w, &i->src[0]), e = exec_of(w), r = (value); put64(w, i, e); set_pair(&w->s[SG_EXEC], r); w->scc = r != 0; }
SAVEEXEC_LIST(DEF_SAVEEXEC)
#define WREXEC_LIST(X) X(s_andn1_wrexec_b64, ~x & e) X(s_andn2_wrexec_b64, x & ~e)
#define DEF_WREXEC(name, value) \
  static void op_##name(Wave *w, const Inst *i) { \
    u64 x = sread64(w, &i->src[0]), e = exec_of(w), r = (value); set_pair(&w->s[SG_EXEC], r); put64(w, i, r); w->scc = r != 0; }
WREXEC_LIST(DEF_WREXEC)

#define SOPC_LIST(X) \
  X(s_cmp_eq_i32, 32, (u32)x == (u32)y) X(s_cmp_lg_i32, 32, (u32)x != (u32)y) X(s_cmp_gt_i32, 32, (i32)x > (i32)y) X(s_cmp_ge_i32, 32, (i32)x >= (i32)y) \
  X(s_cmp_lt_i32, 32, (i32)x < (i32)y) X(s_cmp_le_i32, 32, (i32)x <= (i32)y) X(s_cmp_eq_u32, 32, (u32)x == (u32)y) X(s_cmp_lg_u32, 32, (u32)x != (u32)y) \
  X(s_cmp_gt_u32, 32, (u32)x > (u32)y) X(s_cmp_ge_u32, 32, (u32)x >= (u32)y) X(s_cmp_lt_u32, 32, (u32)x < (u32)y) X(s_cmp_le_u32, 32, (u32)x <= (u32)y) \
  X(s_bitcmp0_b32, 32, !(x >> (y & 31) & 1)) X(s_bitcmp1_b32, 32, x >> (y & 31) & 1) X(s_cmp_eq_u64, 64, x == y) X(s_cmp_lg_u64, 64, x != y)
#define GET32(k) sread(w, &i->src[k])
#define GET64(k) sread64(w, &i->src[k])
#define DEF_SOPC(name, bits, value) \
  static void op_##name(Wave *w, const Inst *i) { u64 x = GET##bits(0), y = GET##bits(1); w->scc = (value) ? 1 : 0; }
SOPC_LIST(DEF_SOPC)
#define SOPC_MIXED_LIST(X) X(s_bitcmp0_b64, 0) X(s_bitcmp1_b64, 1)
#define DEF_SOPC_MIXED(name, want) \
  static void op_##name(Wave *w, const Inst *i) { w->scc = (sread64(w, &i->src[0]) >> (sread(w, &i->src[1]) & 63) & 1) == want; }
SOPC_MIXED_LIST(DEF_SOPC_MIXED)

#define SOPK_CMP_LIST(X) \
  X(s_cmpk_eq_i32, x == y) X(s_cmpk_lg_i32, x != y) X(s_cmpk_gt_i32, x > y) X(s_cmpk_ge_i32, x >= y) X(s_cmpk_lt_i32, x < y) X(s_cmpk_le_i32, x <= y) \
  X(s_cmpk_eq_u32, (u32)x == z) X(s_cmpk_lg_u32, (u32)x != z) X(s_cmpk_gt_u32, (u32)x > z) X(s_cmpk_ge_u32, (u32)x >= z) X(s_cmpk_lt_u32, (u32)x < z) X(s_cmpk_le_u32, (u32)x <= z)
#define DEF_SOPK_CMP(name, value) \
  static void op_##name(Wave *w, const Inst *i) { \
    i32 x = (i32)sread(w, &i->src[0]), y = (int16_t)i->simm; u32 z = i->simm; (void)y; (void)z; w->scc = (value) ? 1 : 0; }
SOPK_CMP_LIST(DEF_SOPK_CMP)
static void op_s_movk_i32(Wave *w, const Inst *i) { put(w, i, (u32)(i32)(int16_t)i->simm); }
static void op_s_cmovk_i32(Wave *w, const Inst *i) { if (w->scc) put(w, i, (u32)(i32)(int16_t)i->simm); }
static void op_s_mulk_i32(Wave *w, const Inst *i) { put(w, i, w->s[i->dst.idx] * (u32)(i32)(int16_t)i->simm); }
static void op_s_addk_i32(Wave *w, const Inst *i) {
  u32 x = w->s[i->dst.idx], y = (u32)(i32)(int16_t)i->simm, r = x + y;
  put(w, i, r); w->scc = ((x ^ r) & (y ^ r)) >> 31;
}

static void smem_load(Wave *w, const Inst *i) {
  int n = i->bytes / 4;
  u64 base = pair(&w->s[i->src[0].idx]), off = (u64)(i64)i->imm, limit = 0;
  if (i->nsrc > 1) off += sread(w, &i->src[1]);
  if (i->src[0].width == 4) { base &= 0xffffffffffffull; limit = w->s[i->src[0].idx + 2]; }
  u64 addr = (base + off) & ~(u64)3;
  u32 x[16] = {0};
  if (limit) {
    for (int k = 0; k < n; k++)
      if (off + 4 * k + 4 <= limit) {
        u64 a = addr + 4 * k;
        if (!check_lanes(w, i, &a, 1, 4, 0)) return;
        x[k] = *(volatile u32 *)(uintptr_t)a;
      }
  } else {
    if (!check_lanes(w, i, &addr, 1, 4 * n, 0)) return;
    for (int k = 0; k < n; k++) x[k] = ((volatile u32 *)(uintptr_t)addr)[k];
    count_traffic(w, i, &addr, 1, 4 * n, 0);
    if (w->chk) { race_enter(w); check_global(w, i, &addr, 1, 4 * n, 0, 0, SCOPE_WAVE); race_leave(w); }
  }
  memcpy(&w->s[i->dst.idx], x, 4 * n);
  note_poll(w, i, addr, x[0]);
  if (w->chk) check_issue(w, i, CNT_SMEM, 0);
}
#define SMEM_LIST(X) X(s_load_dword) X(s_load_dwordx2) X(s_load_dwordx4) X(s_load_dwordx8) X(s_load_dwordx16) \
  X(s_buffer_load_dword) X(s_buffer_load_dwordx2) X(s_buffer_load_dwordx4) X(s_buffer_load_dwordx8) X(s_buffer_load_dwordx16)
#define DEF_SMEM(name) static void op_##name(Wave *w, const Inst *i) { smem_load(w, i); }
SMEM_LIST(DEF_SMEM)
static void op_s_memtime(Wave *w, const Inst *i) {
  put64(w, i, w->worker->clock + w->executed);
  if (w->chk) check_issue(w, i, CNT_SMEM, 0);
}
#define op_s_memrealtime op_s_memtime

u32 special_value(const Wave *w, u32 code, int half) {
  switch (code) {
    case 235: return half ? 0x00010000u : 0; /* shared_base: bits 63:32 of the LDS aperture */
    case 236: return half ? 0x0001ffffu : ~0u;
    case 237: return half ? 0x00020000u : 0; /* private_base */
    case 238: return half ? 0x0002ffffu : ~0u;
    case 251: return half ? 0 : pair(&w->s[SG_VCC]) == 0;
    case 252: return half ? 0 : exec_of(w) == 0;
    case 253: return half ? 0 : w->scc;
    default: return 0;
  }
}

const OpEntry scalar_ops[] = {
  SOP2_LIST(ENTRY) SOP2_64_LIST(ENTRY) SHIFT64_LIST(ENTRY) SOP1_LIST(ENTRY) SAVEEXEC_LIST(ENTRY) WREXEC_LIST(ENTRY)
  SOPC_LIST(ENTRY) SOPC_MIXED_LIST(ENTRY) SOPK_CMP_LIST(ENTRY) SMEM_LIST(ENTRY) ENTRY(s_cselect_b64) ENTRY(s_bfm_b64)
  ENTRY(s_bitreplicate_b64_b32) ENTRY(s_movk_i32) ENTRY(s_cmovk_i32) ENTRY(s_mulk_i32) ENTRY(s_addk_i32)
  ENTRY(s_memtime) {"s_memrealtime", op_s_memtime}, {0, 0}};
