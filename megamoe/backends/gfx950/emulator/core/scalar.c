/* SOP1, SOP2, SOPC, SOPK, SOPP, SMEM: everything that a wave does once, not per lane. */
#include "emu.h"

static inline void put(Wave *w, const Inst *i, u32 x) { w->s[i->dst.idx] = x; }
static inline void put64(Wave *w, const Inst *i, u64 x) { set_pair(&w->s[i->dst.idx], x); }

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

/* Hardware registers: id in bits 5:0, first bit in 10:6, width - 1 in 15:11. */
enum { HW_MODE = 1, HW_STATUS = 2, HW_TRAPSTS = 3, HW_ID = 4, HW_GPR_ALLOC = 5, HW_LDS_ALLOC = 6, HW_IB_STS = 7, HW_SH_MEM_BASES = 15, HW_XCC_ID = 20, CUS_PER_ENGINE = 8 /* of a shader engine; a die has four */ };
static void op_s_getreg_b32(Wave *w, const Inst *i) {
  u32 id = i->simm & 63, at = i->simm >> 6 & 31, n = (i->simm >> 11 & 31) + 1, x;
  Group *g = w->group;
  switch (id) {
    case HW_MODE: x = w->mode; break;
    case HW_STATUS: x = w->scc | (exec_of(w) == 0) << 9 | (pair(&w->s[SG_VCC]) == 0) << 10 | (g->num_waves > 1) << 11 | 1u << 16; break;
    case HW_TRAPSTS: case HW_IB_STS: x = 0; break;
    case HW_ID: { u32 cu = g->cu % (w->machine->num_cus / w->machine->num_xcds); x = (w->idx & 15) | (w->idx & 3) << 4 | (cu % CUS_PER_ENGINE) << 8 | (cu / CUS_PER_ENGINE & 7) << 13; break; }
    case HW_GPR_ALLOC: x = (w->num_rows / 8 - 1) << 8; break;
    case HW_LDS_ALLOC: x = (g->lds_bytes + 1279) / 1280 << 12; break;
    case HW_SH_MEM_BASES: x = 0x00020001; break;
    case HW_XCC_ID: x = g->xcd; break;
    default: fault(w, i, FAULT_UNIMPLEMENTED, id, -1, "s_getreg_b32 of hardware register %u", id); return;
  }
  put(w, i, n == 32 ? x : (x >> at) & ((1u << n) - 1));
}
static void set_mode(Wave *w, const Inst *i, u32 value) {
  u32 id = i->simm & 63, at = i->simm >> 6 & 31, n = (i->simm >> 11 & 31) + 1;
  if (id != HW_MODE) { fault(w, i, FAULT_UNIMPLEMENTED, id, -1, "s_setreg of hardware register %u", id); return; }
  u32 field = n == 32 ? ~0u : ((1u << n) - 1) << at;
  w->mode = (w->mode & ~field) | (value << at & field);
  if (w->mode & 15) fault(w, i, FAULT_MODE, w->mode, -1, "rounding mode %#x: only round to nearest even is executed", w->mode & 15);
}
static void op_s_setreg_b32(Wave *w, const Inst *i) { set_mode(w, i, sread(w, &i->src[0])); }
static void op_s_setreg_imm32_b32(Wave *w, const Inst *i) { set_mode(w, i, i->src[0].lo); }

#define BRANCH_LIST(X) \
  X(s_branch, 1) X(s_cbranch_scc0, !w->scc) X(s_cbranch_scc1, w->scc) X(s_cbranch_vccz, !pair(&w->s[SG_VCC])) \
  X(s_cbranch_vccnz, pair(&w->s[SG_VCC])) X(s_cbranch_execz, !exec_of(w)) X(s_cbranch_execnz, exec_of(w))
#define DEF_BRANCH(name, taken) static void op_##name(Wave *w, const Inst *i) { if (taken) w->pc = i->target; }
BRANCH_LIST(DEF_BRANCH)
static void go_to(Wave *w, const Inst *i, u64 address) {
  Launch *l = w->launch;
  for (u32 k = 0; k < l->num_insts; k++)
    if (l->prog[k].offset == address) { w->pc = k; return; }
  fault(w, i, FAULT_MEMORY, address, -1, "jump to %#llx, which is no instruction of the kernel", (unsigned long long)address);
}
/* Code addresses are byte offsets in the kernel: nothing but jumps uses them. */
static void op_s_getpc_b64(Wave *w, const Inst *i) { put64(w, i, i->offset + i->size); }
static void op_s_setpc_b64(Wave *w, const Inst *i) { go_to(w, i, sread64(w, &i->src[0])); }
static void op_s_swappc_b64(Wave *w, const Inst *i) {
  u64 to = sread64(w, &i->src[0]);
  put64(w, i, i->offset + i->size); go_to(w, i, to);
}
static void op_s_call_b64(Wave *w, const Inst *i) { put64(w, i, i->offset + i->size); w->pc = i->target; }

/* Register indexing: M0 has the distance in bits 7:0 and, for vector registers, the operand positions in bits 15:12. */
static void indexed_move(Wave *w, const Inst *i, u32 from, u32 to, int words) {
  if (from + (u32)words > SG_VCC || to + (u32)words > SG_VCC) { fault(w, i, FAULT_MEMORY, from > to ? from : to, -1, "indexed scalar register s%u is out of range", from > to ? from : to); return; }
  for (int k = 0; k < words; k++) w->s[to + k] = w->s[from + k];
}
#define MOVREL_LIST(X) X(s_movrels_b32, 1, 1, 0) X(s_movrels_b64, 2, 1, 0) X(s_movreld_b32, 1, 0, 1) X(s_movreld_b64, 2, 0, 1)
#define DEF_MOVREL(name, words, source, target) static void op_##name(Wave *w, const Inst *i) { \
  if (i->src[0].kind != K_SGPR) { fault(w, i, FAULT_UNIMPLEMENTED, 0, -1, #name " of a constant"); return; } \
  indexed_move(w, i, i->src[0].idx + (source ? w->s[SG_M0] : 0), i->dst.idx + (target ? w->s[SG_M0] : 0), words); }
MOVREL_LIST(DEF_MOVREL)
static void set_index(Wave *w, u32 distance, u32 positions) { w->s[SG_M0] = (w->s[SG_M0] & 0xffff0f00u) | (distance & 255) | positions << 12; }
static void op_s_set_gpr_idx_on(Wave *w, const Inst *i) { set_index(w, sread(w, &i->src[0]), i->simm); w->indexed = 1; }
static void op_s_set_gpr_idx_idx(Wave *w, const Inst *i) { set_index(w, sread(w, &i->src[0]), w->s[SG_M0] >> 12 & 15); }
static void op_s_set_gpr_idx_mode(Wave *w, const Inst *i) { set_index(w, w->s[SG_M0], i->simm & 15); }
static void op_s_set_gpr_idx_off(Wave *w, const Inst *i) { (void)i; w->indexed = 0; }

static void op_s_nop(Wave *w, const Inst *i) { (void)w; (void)i; }
#define op_s_setprio op_s_nop
#define op_s_icache_inv op_s_nop
#define op_s_dcache_inv op_s_nop
#define op_s_dcache_wb op_s_nop
#define op_s_sethalt op_s_nop
#define op_s_wakeup op_s_nop
#define op_s_ttracedata op_s_nop
#define op_s_incperflevel op_s_nop
#define op_s_decperflevel op_s_nop
static void op_s_waitcnt(Wave *w, const Inst *i) { if (w->chk) check_wait(w, i->simm); }
static void op_s_sleep(Wave *w, const Inst *i) {
  (void)i;
  w->state = ST_YIELD; w->parked_change = w->worker->view; w->sleeping = 1;
}
static void op_s_barrier(Wave *w, const Inst *i) { (void)i; w->state = ST_BARRIER; }
static void op_s_endpgm(Wave *w, const Inst *i) { (void)i; w->state = ST_END; }
static void op_s_trap(Wave *w, const Inst *i) { fault(w, i, FAULT_TRAP, i->simm, -1, "s_trap %u", i->simm); }
static void op_s_sendmsg(Wave *w, const Inst *i) { fault(w, i, FAULT_UNIMPLEMENTED, i->simm, -1, "s_sendmsg %u", i->simm); }

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
  SOPC_LIST(ENTRY) SOPC_MIXED_LIST(ENTRY) SOPK_CMP_LIST(ENTRY) BRANCH_LIST(ENTRY) SMEM_LIST(ENTRY)
  ENTRY(s_cselect_b64) ENTRY(s_bfm_b64) ENTRY(s_bitreplicate_b64_b32) ENTRY(s_movk_i32) ENTRY(s_cmovk_i32) ENTRY(s_mulk_i32)
  ENTRY(s_addk_i32) ENTRY(s_getreg_b32) ENTRY(s_setreg_b32) ENTRY(s_setreg_imm32_b32) ENTRY(s_getpc_b64) ENTRY(s_setpc_b64)
  ENTRY(s_swappc_b64) ENTRY(s_call_b64) ENTRY(s_nop) {"s_setprio", op_s_nop}, {"s_icache_inv", op_s_nop}, {"s_dcache_inv", op_s_nop},
  {"s_dcache_wb", op_s_nop}, {"s_sethalt", op_s_nop}, {"s_wakeup", op_s_nop}, {"s_ttracedata", op_s_nop}, {"s_incperflevel", op_s_nop},
  {"s_decperflevel", op_s_nop}, ENTRY(s_waitcnt) ENTRY(s_sleep) ENTRY(s_barrier) ENTRY(s_endpgm) ENTRY(s_trap) ENTRY(s_sendmsg)
  {"s_dcache_inv_vol", op_s_nop}, {"s_dcache_wb_vol", op_s_nop}, {"s_endpgm_saved", op_s_endpgm}, MOVREL_LIST(ENTRY)
  ENTRY(s_set_gpr_idx_on) ENTRY(s_set_gpr_idx_idx) ENTRY(s_set_gpr_idx_mode) ENTRY(s_set_gpr_idx_off) ENTRY(s_memtime) {"s_memrealtime", op_s_memtime}, {0, 0}};
