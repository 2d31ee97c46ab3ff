/* Control: branches, hardware registers, register indexing, waits, and what ends or stops a wave. */
#include "scalar.h"

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
static void op_s_waitcnt(Wave *w, const Inst *i) { if (w->chk) check_wait(w, i->simm); }
static void op_s_sleep(Wave *w, const Inst *i) {
  (void)i;
  w->state = ST_YIELD; w->parked_change = w->worker->view; w->sleeping = 1;
}
static void op_s_barrier(Wave *w, const Inst *i) { (void)i; w->state = ST_BARRIER; }
static void op_s_endpgm(Wave *w, const Inst *i) { (void)i; w->state = ST_END; }
static void op_s_trap(Wave *w, const Inst *i) { fault(w, i, FAULT_TRAP, i->simm, -1, "s_trap %u", i->simm); }
static void op_s_sendmsg(Wave *w, const Inst *i) { fault(w, i, FAULT_UNIMPLEMENTED, i->simm, -1, "s_sendmsg %u", i->simm); }

/* Hints, caches and counters that change nothing here. */
#define NOP_LIST(X) X(s_setprio) X(s_icache_inv) X(s_dcache_inv) X(s_dcache_wb) X(s_dcache_inv_vol) X(s_dcache_wb_vol) X(s_sethalt) X(s_wakeup) \
  X(s_ttracedata) X(s_incperflevel) X(s_decperflevel)
#define E_NOP(name) {#name, op_s_nop},
const OpEntry control_ops[] = {
  BRANCH_LIST(ENTRY) MOVREL_LIST(ENTRY) NOP_LIST(E_NOP) ENTRY(s_nop) ENTRY(s_getreg_b32) ENTRY(s_setreg_b32) ENTRY(s_setreg_imm32_b32)
  ENTRY(s_getpc_b64) ENTRY(s_setpc_b64) ENTRY(s_swappc_b64) ENTRY(s_call_b64) ENTRY(s_set_gpr_idx_on) ENTRY(s_set_gpr_idx_idx)
  ENTRY(s_set_gpr_idx_mode) ENTRY(s_set_gpr_idx_off) ENTRY(s_waitcnt) ENTRY(s_sleep) ENTRY(s_barrier) ENTRY(s_endpgm)
  {"s_endpgm_saved", op_s_endpgm}, ENTRY(s_trap) ENTRY(s_sendmsg) {0, 0}};
