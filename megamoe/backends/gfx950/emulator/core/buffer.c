/* MUBUF and MTBUF: loads, stores and loads into LDS through a buffer descriptor, raw and with a format.
 *
 * Lanes past num_records are dropped: loads give zero, stores do nothing. A raw access of several dwords is cut dword by
 * dword. Descriptor word 3 has the component selects, the number format and the data format. */
#include "vmem.h"

void buffer_addresses(Wave *w, const Inst *i, int bytes, Lanes *x, u32 *offset, u64 *limit) {
  const u32 *r = &w->s[i->src[1].idx];
  u64 base = (r[0] | (u64)r[1] << 32) & 0xffffffffffffull;
  u32 stride = r[1] >> 16 & 0x3fff, soffset = sread(w, &i->src[2]);
  const Operand *va = &i->src[0];
  x->exec = exec_of(w);
  x->dropped = x->lds = x->scratch = x->partial = 0;
  *limit = r[2];
  if (r[1] >> 31 || r[3] >> 23 & 1) { fault(w, i, FAULT_UNIMPLEMENTED, 0, -1, "a buffer descriptor with swizzle or thread id is not implemented"); x->exec = 0; return; }
  for (int l = 0; l < LANES; l++) {
    u64 index = i->idxen ? w->v[va->idx][l] : 0;
    u32 off = (u32)i->imm + (i->offen ? w->v[va->idx + (i->idxen ? 1 : 0)][l] : 0);
    u64 at = (u64)off + soffset;
    offset[l] = (u32)at;
    x->addr[l] = base + index * stride + at;
    int structured = stride && i->idxen, out = structured ? index >= *limit : at + (u64)(bytes < 4 ? bytes : 4) > *limit;
    x->dropped |= (u64)out << l;
    x->partial |= (u64)(!out && !structured && at + (u64)bytes > *limit) << l;
  }
  x->dropped &= x->exec;
  x->exec &= ~x->dropped;
  x->partial &= x->exec;
}
/* Of a lane that is cut, the dwords that the limit leaves it must be there. */
static int checked(Wave *w, const Inst *i, Lanes *x, const u32 *offset, u64 limit, int bytes, int write) {
  if (w->state == ST_FAULT) return 0;
  for (int k = 0; x->partial && 4 * k < bytes; k++) {
    u64 at[LANES], in = 0;
    int l;
    FOR_ACTIVE(l, x->partial) { at[l] = x->addr[l] + 4 * (u64)k; in |= (u64)((u64)offset[l] + 4 * (u64)k + 4 <= limit) << l; }
    if (!check_lanes(w, i, at, in, 4, write)) return 0;
  }
  if (!check_lanes(w, i, x->addr, x->exec & ~x->partial, bytes, write)) return 0;
  if (x->partial) w->span = 0;
  return 1;
}
static void load(Wave *w, const Inst *i, int bytes, int ext) {
  Lanes x;
  u32 out[4][LANES], offset[LANES];
  u64 limit, all = exec_of(w);
  int words = bytes > 4 ? bytes / 4 : 1, piece = bytes < 4 ? bytes : 4, l;
  buffer_addresses(w, i, bytes, &x, offset, &limit);
  if (!checked(w, i, &x, offset, limit, bytes, 0)) return;
  const u32 *old = i->lds ? 0 : w->v[i->dst.idx];
  FOR_ACTIVE(l, all)
    for (int k = 0; k < words; k++) {
      int in = x.exec >> l & 1 && (!(x.partial >> l & 1) || (u64)offset[l] + 4 * k + 4 <= limit);
      u32 v = in ? raw(x.addr[l] + 4 * k, piece) : 0;
      out[k][l] = piece < 4 ? extended(old ? old[l] : 0, v, piece, ext) : v;
    }
  if (i->lds) {
    u32 width = (u32)(bytes < 4 ? 4 : bytes), at[LANES];
    for (l = 0; l < LANES; l++) at[l] = w->s[SG_M0] + (u32)i->imm + (u32)l * width;
    u8 *lds = lds_lanes(w, i, at, all, (int)width, LDS_LOADED);
    if (!lds) return;
    FOR_ACTIVE(l, all) for (int k = 0; k < words; k++) memcpy(lds + at[l] + 4 * k, &out[k][l], 4);
    w->launch->traffic->dma_bytes += (u64)bytes * (u64)__builtin_popcountll(all);
  } else {
    for (int k = 0; k < words; k++) merge_row(w, w->v[i->dst.idx + k], out[k]);
  }
  count_traffic(w, i, x.addr, x.exec, bytes, 0);
  if (x.exec) { l = __builtin_ctzll(x.exec); note_poll(w, i, x.addr[l], out[0][l]); }
  if (w->chk) {
    if (x.exec & ~x.partial) check_global(w, i, x.addr, x.exec & ~x.partial, bytes, 0, 0, i->scope);
    check_issue(w, i, i->lds ? CNT_VM | CNT_LDS_DMA : CNT_VM, 0);
  }
}
static void store(Wave *w, const Inst *i, int bytes, int high) {
  Lanes x;
  u32 offset[LANES], (*v)[LANES] = &w->v[i->src[3].idx];
  u64 limit;
  int words = bytes > 4 ? bytes / 4 : 1, piece = bytes < 4 ? bytes : 4, l;
  buffer_addresses(w, i, bytes, &x, offset, &limit);
  if (!checked(w, i, &x, offset, limit, bytes, 1)) return;
  if (w->chk && x.exec & ~x.partial) check_global(w, i, x.addr, x.exec & ~x.partial, bytes, 1, 0, i->scope);
  FOR_ACTIVE(l, x.exec)
    for (int k = 0; k < words; k++) {
      if (x.partial >> l & 1) {
        u64 at = x.addr[l] + 4 * (u64)k;
        if ((u64)offset[l] + 4 * k + 4 > limit) break;
        if (w->chk) check_global(w, i, &at, 1, 4, 1, 0, i->scope);
      }
      raw_store(x.addr[l] + 4 * k, piece, high ? v[k][l] >> 16 : v[k][l]);
    }
  count_traffic(w, i, x.addr, x.exec, bytes, 1);
  if (x.exec) note_progress(w);
  if (w->chk) check_issue(w, i, CNT_VM, 1);
}

/* Formats. Data formats of equal components only; the packed ones with 10 and 11 bits are named errors. */
enum { N_UNORM, N_SNORM, N_USCALED, N_SSCALED, N_UINT, N_SINT, N_FLOAT = 7 };
typedef struct { int bits, count, number; u32 select; } Format;
static int format_of(Wave *w, const Inst *i, int typed, Format *f) {
  static const u8 bits[15] = {0, 8, 16, 8, 32, 16, 0, 0, 0, 0, 8, 32, 16, 32, 32}, count[15] = {0, 1, 1, 2, 1, 2, 0, 0, 0, 0, 4, 2, 4, 3, 4};
  u32 word = w->s[i->src[1].idx + 3], data = typed ? i->simm & 15 : word >> 15 & 15, number = typed ? i->simm >> 4 & 7 : word >> 12 & 7;
  f->number = (int)number;
  f->select = word & 0xfff;
  f->bits = data < 15 ? bits[data] : 0;
  f->count = data < 15 ? count[data] : 0;
  if (f->bits && number != 6 && !(number == N_FLOAT && f->bits == 8) && !(number < N_UINT && f->bits == 32)) return 1;
  fault(w, i, FAULT_UNIMPLEMENTED, 0, -1, "buffer data format %u with number format %u is not implemented", data, number);
  return 0;
}
/* A component as the register holds it: float bits, or an integer. */
static u32 from_memory(u32 x, const Format *f) {
  u32 most = f->bits == 32 ? ~0u : (1u << f->bits) - 1;
  i32 s = (i32)(x << (32 - f->bits)) >> (32 - f->bits);
  switch (f->number) {
    case N_UNORM: return as_u((float)x / (float)most);
    case N_SNORM: return as_u(fmaxf((float)s / (float)(most >> 1), -1.0f));
    case N_USCALED: return as_u((float)x);
    case N_SSCALED: return as_u((float)s);
    case N_SINT: return (u32)s;
    case N_FLOAT: return f->bits == 16 ? as_u(half_to_f(x)) : x;
    default: return x;
  }
}
static u32 to_memory(u32 v, const Format *f) {
  float x = as_f(v), most = f->bits == 32 ? 0 : (float)((1u << f->bits) - 1), half = f->bits == 32 ? 0 : (float)((1u << (f->bits - 1)) - 1);
  if (x != x && f->number < N_UINT) x = 0;
  switch (f->number) {
    case N_UNORM: return (u32)rintf(fminf(fmaxf(x, 0), 1) * most);
    case N_SNORM: return (u32)(i32)rintf(fminf(fmaxf(x, -1), 1) * half);
    case N_USCALED: return (u32)fminf(fmaxf(x, 0), most);
    case N_SSCALED: return (u32)(i32)fminf(fmaxf(x, -half - 1), half);
    case N_UINT: return f->bits == 32 || v < (u32)most ? v : (u32)most;
    case N_SINT: return f->bits == 32 ? v : (u32)((i32)v > (i32)half ? (i32)half : (i32)v < -(i32)half - 1 ? -(i32)half - 1 : (i32)v);
    case N_FLOAT: return f->bits == 16 ? f_to_half(x) : v;
    default: return v;
  }
}
/* d16 registers hold two components each: halves for the float formats, integers of 16 bits for the others. */
static u32 narrowed(u32 v, const Format *f) { return f->number == N_UINT || f->number == N_SINT ? v & 0xffff : f_to_half(as_f(v)); }
static u32 widened(u32 h, const Format *f) { return f->number == N_UINT ? h : f->number == N_SINT ? (u32)(i32)(int16_t)h : as_u(half_to_f(h)); }
static void format_load(Wave *w, const Inst *i, int want, int d16, int typed) {
  Lanes x;
  Format f;
  u32 offset[LANES], (*v)[LANES] = &w->v[i->dst.idx];
  u64 limit, all = exec_of(w);
  int l;
  if (!format_of(w, i, typed, &f)) return;
  int each = f.bits / 8, bytes = each * f.count;
  buffer_addresses(w, i, bytes, &x, offset, &limit);
  x.exec &= ~x.partial;
  x.partial = 0;
  if (!checked(w, i, &x, offset, limit, bytes, 0)) return;
  FOR_ACTIVE(l, all) {
    u32 one = f.number == N_UINT || f.number == N_SINT ? 1 : as_u(1.0f), part[8] = {0, one, 0, 0, 0, 0, 0, one}; /* absent components are 0 0 0 1 */
    for (int k = 0; k < f.count && x.exec >> l & 1; k++) part[4 + k] = from_memory(raw(x.addr[l] + (u64)(each * k), each), &f);
    for (int k = 0; k < want; k++) {
      u32 sel = typed ? 4 + (u32)k : f.select >> 3 * k & 7, p = x.exec >> l & 1 ? part[sel] : 0;
      if (!d16) v[k][l] = p;
      else if (d16 == 2) v[0][l] = (v[0][l] & 0xffff) | narrowed(p, &f) << 16;
      else v[k / 2][l] = k & 1 ? (v[k / 2][l] & 0xffff) | narrowed(p, &f) << 16 : want == 1 ? (v[0][l] & 0xffff0000u) | narrowed(p, &f) : narrowed(p, &f);
    }
  }
  count_traffic(w, i, x.addr, x.exec, bytes, 0);
  if (w->chk) { if (x.exec) check_global(w, i, x.addr, x.exec, bytes, 0, 0, i->scope); check_issue(w, i, CNT_VM, 0); }
}
static void format_store(Wave *w, const Inst *i, int given, int d16, int typed) {
  Lanes x;
  Format f;
  u32 offset[LANES], (*v)[LANES] = &w->v[i->src[3].idx];
  u64 limit;
  int l;
  if (!format_of(w, i, typed, &f)) return;
  int each = f.bits / 8, bytes = each * f.count;
  buffer_addresses(w, i, bytes, &x, offset, &limit);
  x.exec &= ~x.partial;
  x.partial = 0;
  if (!checked(w, i, &x, offset, limit, bytes, 1)) return;
  if (w->chk && x.exec) check_global(w, i, x.addr, x.exec, bytes, 1, 0, i->scope);
  FOR_ACTIVE(l, x.exec)
    for (int k = 0; k < f.count; k++) { /* memory component k comes from the register component that selects it */
      int from = -1;
      for (int c = 0; c < given && from < 0; c++) if ((typed ? 4 + c : (int)(f.select >> 3 * c & 7)) == 4 + k) from = c;
      u32 p = from < 0 ? 0 : !d16 ? v[from][l] : widened(d16 == 2 || from & 1 ? v[from / 2][l] >> 16 : v[from / 2][l] & 0xffff, &f);
      raw_store(x.addr[l] + (u64)(each * k), each, to_memory(p, &f));
    }
  count_traffic(w, i, x.addr, x.exec, bytes, 1);
  if (x.exec) note_progress(w);
  if (w->chk) check_issue(w, i, CNT_VM, 1);
}

#define LOCKED(call) { race_enter(w); call; race_leave(w); }
#define LOAD_LIST(X) X(ubyte, 1, EXT_NONE) X(sbyte, 1, EXT_SIGNED) X(ushort, 2, EXT_NONE) X(sshort, 2, EXT_SIGNED) X(dword, 4, EXT_NONE) X(dwordx2, 8, EXT_NONE) \
  X(dwordx3, 12, EXT_NONE) X(dwordx4, 16, EXT_NONE) X(ubyte_d16, 1, EXT_D16) X(ubyte_d16_hi, 1, EXT_D16_HI) X(sbyte_d16, 1, EXT_D16_S) X(sbyte_d16_hi, 1, EXT_D16_HI_S) \
  X(short_d16, 2, EXT_D16) X(short_d16_hi, 2, EXT_D16_HI)
#define STORE_LIST(X) X(byte, 1, 0) X(byte_d16_hi, 1, 1) X(short, 2, 0) X(short_d16_hi, 2, 1) X(dword, 4, 0) X(dwordx2, 8, 0) X(dwordx3, 12, 0) X(dwordx4, 16, 0)
#define FORMAT_LIST(X) X(x, 1, 0) X(xy, 2, 0) X(xyz, 3, 0) X(xyzw, 4, 0) X(d16_x, 1, 1) X(d16_xy, 2, 1) X(d16_xyz, 3, 1) X(d16_xyzw, 4, 1)
#define DEF_LOAD(n, b, e) static void op_buffer_load_##n(Wave *w, const Inst *i) LOCKED(load(w, i, b, e))
#define DEF_STORE(n, b, h) static void op_buffer_store_##n(Wave *w, const Inst *i) LOCKED(store(w, i, b, h))
#define DEF_FORMAT(n, c, d16) \
  static void op_buffer_load_format_##n(Wave *w, const Inst *i) LOCKED(format_load(w, i, c, d16, 0)) \
  static void op_buffer_store_format_##n(Wave *w, const Inst *i) LOCKED(format_store(w, i, c, d16, 0))
#define DEF_TYPED(n, c, d16) \
  static void op_tbuffer_load_format_##n(Wave *w, const Inst *i) LOCKED(format_load(w, i, c, d16, 1)) \
  static void op_tbuffer_store_format_##n(Wave *w, const Inst *i) LOCKED(format_store(w, i, c, d16, 1))
LOAD_LIST(DEF_LOAD)
STORE_LIST(DEF_STORE)
FORMAT_LIST(DEF_FORMAT)
FORMAT_LIST(DEF_TYPED)
DEF_FORMAT(d16_hi_x, 1, 2)

#define E_LOAD(n, b, e) ENTRY(buffer_load_##n)
#define E_STORE(n, b, h) ENTRY(buffer_store_##n)
#define E_FORMAT(n, c, d16) ENTRY(buffer_load_format_##n) ENTRY(buffer_store_format_##n)
#define E_TYPED(n, c, d16) ENTRY(tbuffer_load_format_##n) ENTRY(tbuffer_store_format_##n)
const OpEntry buffer_ops[] = {LOAD_LIST(E_LOAD) STORE_LIST(E_STORE) FORMAT_LIST(E_FORMAT) FORMAT_LIST(E_TYPED) E_FORMAT(d16_hi_x, 1, 2) {0, 0}};
