/* DPP, SDWA, clamp and output modifiers, and the instructions that move data between lanes.
 *
 * A modified instruction runs on a copy whose sources and result are scratch rows: sources are selected first, the
 * plain handler computes, then the result is clamped, scaled and merged. */
#include "valu.h"

enum { R_INT, R_F32, R_F16, R_F64 };

/* Lane that DPP reads for lane l, or -1. */
static int dpp_lane(u32 ctrl, int l) {
  int row = l & ~15, p = l & 15, q;
  if (ctrl < 0x100) return (l & ~3) | (ctrl >> 2 * (l & 3) & 3);
  if (ctrl > 0x100 && ctrl < 0x110) { q = p + (int)(ctrl - 0x100); return q < 16 ? row + q : -1; }
  if (ctrl > 0x110 && ctrl < 0x120) { q = p - (int)(ctrl - 0x110); return q >= 0 ? row + q : -1; }
  if (ctrl > 0x120 && ctrl < 0x130) return row + ((p - (int)(ctrl - 0x120)) & 15);
  switch (ctrl) {
    case 0x130: return l < 63 ? l + 1 : -1;
    case 0x134: return (l + 1) & 63;
    case 0x138: return l - 1;
    case 0x13c: return (l + 63) & 63;
    case 0x140: return row + 15 - p;
    case 0x141: return (l & ~7) + 7 - (l & 7);
    case 0x142: return row ? row - 1 : -1;
    case 0x143: return l >= 32 ? 31 : -1;
  }
  if (ctrl >= 0x150 && ctrl < 0x160) return row + (int)(ctrl - 0x150);
  return -2;
}
static u32 sdwa_select(u32 x, int sel, int sext) {
  if (sel >= 6) return x;
  u32 at = sel < 4 ? 8 * sel : 16 * (sel - 4), bits = sel < 4 ? 8 : 16, v = x >> at & ((1u << bits) - 1);
  return sext ? (u32)((i32)(v << (32 - bits)) >> (32 - bits)) : v;
}
static float modified(float f, int omod, int clamp) {
  f = omod == 1 ? f * 2 : omod == 2 ? f * 4 : omod == 3 ? f / 2 : f;
  return clamp ? (f != f ? 0 : f < 0 ? 0 : f > 1 ? 1 : f) : f;
}
static void finish(Wave *w, const Inst *i, u32 row, u64 e) {
  u32 *lo = w->v[row], *hi = w->v[row + 1];
  for (int l = 0; l < LANES; l++) {
    if (!(e >> l & 1)) continue;
    if (i->pad0 == R_F32) lo[l] = as_u(modified(as_f(lo[l]), i->omod, i->clamp));
    if (i->pad0 == R_F16) lo[l] = (lo[l] & 0xffff0000u) | f_to_half(modified(half_to_f(lo[l] & 0xffff), i->omod, i->clamp));
    if (i->pad0 == R_F64) {
      double d = as_d(lo[l] | (u64)hi[l] << 32);
      d = i->omod == 1 ? d * 2 : i->omod == 2 ? d * 4 : i->omod == 3 ? d / 2 : d;
      u64 q = as_q(i->clamp ? (d != d ? 0 : d < 0 ? 0 : d > 1 ? 1 : d) : d);
      lo[l] = (u32)q; hi[l] = (u32)(q >> 32);
    }
  }
}
void exec_modified(Wave *w, const Inst *i) {
  Inst t = *i;
  u32 row = w->tmp_row;
  u64 e = exec_of(w), run = e;
  t.fn = i->inner;
  for (int k = 0; k < i->nsrc && k < 3 && (i->has_dpp || i->has_sdwa); k++) {
    const Operand *o = &i->src[k];
    if (o->kind == K_SGPR && o->width == 2) continue; /* carry or condition mask */
    for (int half = 0; half < o->width && half < 2; half++) {
      u32 buffer[LANES], *out = w->v[row + 4 + 2 * k + half];
      const u32 *r = source_row(w, i, k, half, buffer, 0);
      if (k == 0 && i->has_dpp) {
        for (int l = 0; l < LANES; l++) {
          int from = dpp_lane(i->dpp, l), on = i->row_mask >> (l >> 4) & 1 && i->bank_mask >> (l >> 2 & 3) & 1;
          if (from == -2) { fault(w, i, FAULT_UNIMPLEMENTED, i->dpp, l, "dpp_ctrl %#x", i->dpp); return; }
          int valid = from >= 0 && e >> from & 1;
          buffer[l] = valid ? (o->kind == K_VGPR ? w->v[o->idx + half][from] : r[l]) : 0;
          if (!on || (!valid && !i->bound_ctrl)) run &= ~((u64)1 << l);
        }
        memcpy(out, buffer, sizeof buffer);
      } else if (i->has_sdwa && k < 2) {
        int sel = k ? i->src1_sel : i->src0_sel, sext = k ? i->src1_sext : i->src0_sext;
        for (int l = 0; l < LANES; l++) buffer[l] = sdwa_select(r[l], sel, sext);
        memcpy(out, buffer, sizeof buffer);
      } else {
        memmove(out, r, sizeof buffer);
      }
    }
    t.src[k].kind = K_VGPR;
    t.src[k].idx = (u16)(row + 4 + 2 * k);
  }
  if (i->has_sdwa) t.opsel = 0;
  int has_dst = i->dst.kind == K_VGPR;
  if (has_dst) {
    for (int half = 0; half < i->dst.width && half < 2; half++) memcpy(w->v[row + half], w->v[i->dst.idx + half], sizeof(u32) * LANES);
    t.dst.idx = (u16)row;
  }
  t.omod = t.clamp = 0;
  set_pair(&w->s[SG_EXEC], run);
  CALL(&t, w);
  if (has_dst) {
    finish(w, i, row, run);
    for (int half = 0; half < i->dst.width && half < 2; half++) {
      u32 *D = w->v[i->dst.idx + half], *x = w->v[row + half];
      for (int l = 0; l < LANES; l++) {
        if (!(run >> l & 1)) continue;
        if (!i->has_sdwa || i->dst_sel >= 6) { D[l] = x[l]; continue; }
        u32 bits = i->dst_sel < 4 ? 8 : 16, at = i->dst_sel < 4 ? 8 * i->dst_sel : 16 * (i->dst_sel - 4), one = (1u << bits) - 1, v = x[l] & one;
        if (i->dst_unused == 2) D[l] = (D[l] & ~(one << at)) | v << at;
        else if (i->dst_unused == 1) D[l] = (u32)((i32)(v << (32 - bits)) >> (32 - bits)) << at;
        else D[l] = v << at;
      }
    }
  }
  if (!(i->dst.kind == K_NONE && exec_of(w) != run)) set_pair(&w->s[SG_EXEC], e); /* cmpx keeps its new EXEC */
}

/* While indexing is on, vector instructions move the register numbers of the chosen operands by M0. */
static int move_register(Wave *w, const Inst *i, Operand *o) {
  o->idx = (u16)(o->idx + (w->s[SG_M0] & 255));
  if (o->idx + o->width <= w->num_rows) return 1;
  fault(w, i, FAULT_MEMORY, o->idx, -1, "indexed vector register v%u is outside of the wave's %u", o->idx, w->num_rows);
  return 0;
}
void exec_indexed(Wave *w, const Inst *i) {
  Inst t = *i;
  u32 positions = w->s[SG_M0] >> 12;
  t.nreads = t.nwrites = 0;
  for (int k = 0; k < i->nsrc && k < 3; k++) {
    if (i->src[k].kind != K_VGPR) continue;
    if (positions >> k & 1 && !move_register(w, i, &t.src[k])) return;
    t.reads[t.nreads++] = (Range){t.src[k].idx, t.src[k].width};
  }
  if (i->dst.kind == K_VGPR) {
    if (positions >> 3 & 1 && !move_register(w, i, &t.dst)) return;
    t.writes[t.nwrites++] = (Range){t.dst.idx, t.dst.width};
  }
  if (w->chk) check_moved(w, i, &t);
  CALL(&t, w);
}

static int first_lane(const Wave *w) { u64 e = exec_of(w); return e ? __builtin_ctzll(e) : 0; }
static void op_v_readfirstlane_b32(Wave *w, const Inst *i) {
  w->s[i->dst.idx] = i->src[0].kind == K_VGPR ? w->v[i->src[0].idx][first_lane(w)] : sread(w, &i->src[0]);
}
static void op_v_readlane_b32(Wave *w, const Inst *i) { w->s[i->dst.idx] = w->v[i->src[0].idx][sread(w, &i->src[1]) & 63]; }
static void op_v_writelane_b32(Wave *w, const Inst *i) { w->v[i->dst.idx][sread(w, &i->src[1]) & 63] = sread(w, &i->src[0]); }
static void op_v_permlane32_swap_b32(Wave *w, const Inst *i) {
  u32 *a = w->v[i->dst.idx], *b = w->v[i->src[0].idx];
  for (int l = 0; l < 32; l++) { u32 t = a[l + 32]; a[l + 32] = b[l]; b[l] = t; }
}
static void op_v_permlane16_swap_b32(Wave *w, const Inst *i) {
  u32 *a = w->v[i->dst.idx], *b = w->v[i->src[0].idx];
  for (int h = 0; h < 64; h += 32)
    for (int l = 0; l < 16; l++) { u32 t = a[h + l + 16]; a[h + l + 16] = b[h + l]; b[h + l] = t; }
}

const OpEntry modifier_ops[] = {ENTRY(v_readfirstlane_b32) ENTRY(v_readlane_b32) ENTRY(v_writelane_b32) ENTRY(v_permlane32_swap_b32) ENTRY(v_permlane16_swap_b32) {0, 0}};
