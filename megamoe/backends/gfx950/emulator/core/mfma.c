/* Matrix instructions. Operands are unpacked to float with the lanes of a register as one vector: matrix row (A) or
 * column (B) is the lane within its group, so a register's sixteen or thirty-two lanes fill one row of [k][lane].
 *
 * Results: 16x16: row 4 * (lane / 16) + r, column lane % 16. 32x32: row 8 * (r / 4) + 4 * (lane / 32) + r % 4, column
 * lane % 32. 4x4 with sixteen blocks: block lane / 4, row r, column lane % 4. */
#include "valu.h"

enum { T_F32, T_F16, T_BF16, T_I8, T_FP8, T_BF8, T_FP6, T_BF6, T_FP4 };
typedef struct { float k[128][32] __attribute__((aligned(64))); } Tile;

/* Small formats as floats without tables, so that a row of lanes is vector code. */
static inline float e4m3(u32 x) {
  u32 mag = x & 0x7f;
  float f = mag < 8 ? (float)(i32)mag * 0x1p-9f : as_f((mag << 20) + (120u << 23));
  f = mag == 0x7f ? as_f(0x7fc00000u) : f;
  return as_f(as_u(f) | (x & 0x80) << 24);
}
static inline float e5m2(u32 x) {
  u32 mag = x & 0x7f;
  float f = mag < 4 ? (float)(i32)mag * 0x1p-16f : as_f((mag << 21) + (112u << 23));
  f = mag >= 0x7c ? as_f(0x7f800000u | (mag & 3) << 21) : f;
  return as_f(as_u(f) | (x & 0x80) << 24);
}
static inline float e2m1(u32 x) {
  u32 mag = x & 7;
  float f = mag < 2 ? (float)(i32)mag * 0.5f : as_f((mag << 22) + (126u << 23));
  return as_f(as_u(f) | (x & 8) << 28);
}
static inline float e2m3(u32 x) {
  u32 mag = x & 31;
  float f = mag < 8 ? (float)(i32)mag * 0.125f : as_f((mag << 20) + (126u << 23));
  return as_f(as_u(f) | (x & 32) << 26);
}
static inline float e3m2(u32 x) {
  u32 mag = x & 31;
  float f = mag < 4 ? (float)(i32)mag * 0.0625f : as_f((mag << 21) + (124u << 23));
  return as_f(as_u(f) | (x & 32) << 26);
}
/* Element e of every lane as a float. */
#define EACH(value) for (int l = 0; l < LANES; l++) { u32 x = r[l]; (void)x; out[l] = (value); } break
static void element(Wave *w, u32 row, int type, int e, float *restrict out) {
  int bits = type == T_F32 ? 32 : type <= T_BF16 ? 16 : type <= T_BF8 ? 8 : type == T_FP4 ? 4 : 6;
  int bit = bits * e, at = bit & 31;
  const u32 *restrict r = w->v[row + (bit >> 5)];
  u32 both[LANES];
  if (bits == 6) { /* may lie across two registers */
    const u32 *next = at > 26 ? r + LANES : r;
    for (int l = 0; l < LANES; l++) both[l] = (u32)((r[l] | (u64)next[l] << 32) >> at) & 63;
    r = both;
  }
  switch (type) {
    case T_F32: EACH(as_f(x));
    case T_F16: EACH(half_to_f(x >> at & 0xffff));
    case T_BF16: EACH(as_f(x >> at << 16));
    case T_I8: EACH((float)(int8_t)(x >> at));
    case T_FP8: EACH(e4m3(x >> at));
    case T_BF8: EACH(e5m2(x >> at));
    case T_FP4: EACH(e2m1(x >> at));
    case T_FP6: EACH(e2m3(x));
    case T_BF6: EACH(e3m2(x));
  }
}
/* Depth `k` of the tile from the lanes of group g. */
static inline void put_row(Tile *t, int k, const float *lanes, int size) { memcpy(t->k[k], lanes, 4 * (size_t)size); }
typedef float V __attribute__((vector_size(64), aligned(4)));
/* acc[m][n] += sum over k of a[k][m] * b[k][n], n = 16 or 32 lanes wide; eight accumulators stay in registers. */
#if defined(__GNUC__) && !defined(__clang__)
#define FUSED __attribute__((optimize("fp-contract=fast"))) /* a product is exact before it is added, as in the matrix unit */
#else
#define FUSED
#endif
static FUSED void multiply16(float (*acc)[32], const Tile *a, const Tile *b, int depth) {
  for (int m0 = 0; m0 < 16; m0 += 8) {
    V s[8];
    for (int m = 0; m < 8; m++) s[m] = *(const V *)acc[m0 + m];
    for (int k = 0; k < depth; k++) {
      V y = *(const V *)b->k[k];
      for (int m = 0; m < 8; m++) s[m] += a->k[k][m0 + m] * y;
    }
    for (int m = 0; m < 8; m++) *(V *)acc[m0 + m] = s[m];
  }
}
static FUSED void multiply32(float (*acc)[32], const Tile *a, const Tile *b, int depth) {
  for (int m0 = 0; m0 < 32; m0 += 4) {
    V s[4][2];
    for (int m = 0; m < 4; m++) for (int h = 0; h < 2; h++) s[m][h] = *(const V *)&acc[m0 + m][16 * h];
    for (int k = 0; k < depth; k++)
      for (int h = 0; h < 2; h++) {
        V y = *(const V *)&b->k[k][16 * h];
        for (int m = 0; m < 4; m++) s[m][h] += a->k[k][m0 + m] * y;
      }
    for (int m = 0; m < 4; m++) for (int h = 0; h < 2; h++) *(V *)&acc[m0 + m][16 * h] = s[m][h];
  }
}
static void multiply(float (*acc)[32], const Tile *a, const Tile *b, int size, int depth) {
  if (size == 16) multiply16(acc, a, b, depth);
  else multiply32(acc, a, b, depth);
}
static inline int result_row(int size, int r, int group) { return size == 16 ? 4 * group + r : 8 * (r / 4) + 4 * group + r % 4; }
static inline u32 accumulator(Wave *w, const Inst *i, int k, int r, int lane) {
  const Operand *o = &i->src[k];
  return o->kind == K_VGPR ? w->v[o->idx + r][lane] : o->kind == K_CONST ? o->lo : sread(w, o);
}

/* One-block 16x16 and 32x32 forms: `size` lanes to a group, each with `each` elements of depth. */
static void square(Wave *w, const Inst *i, int size, int each, int ta, int tb, int is_int) {
  static __thread Tile a, b;
  float acc[32][32] __attribute__((aligned(64)));
  u32 out[16][LANES];
  int groups = LANES / size, regs = size * size / LANES;
  unsigned old = denormals_on();
  float lanes[2][LANES];
  for (int e = 0; e < each; e++) {
    element(w, i->src[0].idx, ta, e, lanes[0]);
    element(w, i->src[1].idx, tb, e, lanes[1]);
    for (int g = 0; g < groups; g++) {
      put_row(&a, g * each + e, lanes[0] + g * size, size);
      put_row(&b, g * each + e, lanes[1] + g * size, size);
    }
  }
  memset(acc, 0, sizeof acc);
  if (!is_int)
    for (int r = 0; r < regs; r++)
      for (int g = 0; g < groups; g++)
        for (int n = 0; n < size; n++) acc[result_row(size, r, g)][n] = as_f(accumulator(w, i, 2, r, g * size + n));
  multiply(acc, &a, &b, size, groups * each);
  for (int r = 0; r < regs; r++)
    for (int g = 0; g < groups; g++)
      for (int n = 0; n < size; n++) {
        float f = acc[result_row(size, r, g)][n];
        out[r][g * size + n] = is_int ? accumulator(w, i, 2, r, g * size + n) + (u32)(i32)f : as_u(f);
      }
  for (int r = 0; r < regs; r++) memcpy(w->v[i->dst.idx + r], out[r], sizeof out[r]);
  denormals_back(old);
}
/* Several small blocks side by side; cbsz and abid broadcast a block of A, blgp rotates or broadcasts groups of B. */
static int b_lane(int blgp, int l) {
  switch (blgp) {
    case 1: return l & 31;
    case 2: return (l & 31) | 32;
    case 3: return (l + 16) & 63;
    case 4: case 5: case 6: case 7: return (l & 15) | (blgp - 4) << 4;
    default: return l;
  }
}
static void blocks(Wave *w, const Inst *i, int size, int each, int type, int is_int) {
  int count = LANES / size, regs = size * size / LANES ? size * size / LANES : 1;
  if (size == 4) regs = 4;
  float a[16][LANES], b[16][LANES];
  u32 out[32][LANES];
  unsigned old = denormals_on();
  for (int e = 0; e < each; e++) { element(w, i->src[0].idx, type, e, a[e]); element(w, i->src[1].idx, type, e, b[e]); }
  int num = size == 4 ? 1 : count;
  for (int block = 0; block < num; block++)
    for (int r = 0; r < regs; r++)
      for (int l = 0; l < LANES; l++) {
        int own = size == 4 ? l / 4 : block, row = size == 4 ? r : result_row(size, r, l / size), n = l % size;
        int from = i->cbsz ? (own & ~((1 << i->cbsz) - 1)) | (i->abid & ((1 << i->cbsz) - 1)) : own;
        u32 c = accumulator(w, i, 2, block * regs + r, l);
        float s = is_int ? 0 : as_f(c);
        for (int e = 0; e < each; e++) s += a[e][from * size + row] * b[e][b_lane(i->blgp, own * size + n)];
        out[block * regs + r][l] = is_int ? c + (u32)(i32)s : as_u(s);
      }
  for (int r = 0; r < num * regs; r++) memcpy(w->v[i->dst.idx + r], out[r], sizeof out[r]);
  denormals_back(old);
}

/* f8f6f4: eight-bit formats hold depth 16g.. and K/2 + 16g.. in lane group g, narrower ones 32g..32g+31. */
static const int FORMATS[5] = {T_FP8, T_BF8, T_FP6, T_BF6, T_FP4};
static void unpack_f8f6f4(Wave *w, u32 row, int format, int size, Tile *t) {
  int groups = LANES / size, half = 16 * groups;
  float lanes[LANES];
  for (int e = 0; e < 32; e++) {
    element(w, row, FORMATS[format], e, lanes);
    for (int g = 0; g < groups; g++) put_row(t, format > 1 ? 32 * g + e : e < 16 ? 16 * g + e : half + 16 * g + e - 16, lanes + g * size, size);
  }
}
/* The scale of depths 32g..32g+31 comes from lane group g. */
static void apply_scale(Wave *w, const Inst *i, int k, int size, Tile *t) {
  u32 buffer[LANES];
  const u32 *s = source_row(w, i, 3 + k, 0, buffer, 0);
  int at = 8 * ((i->opsel >> k & 1) | (i->opsel_hi >> k & 1) << 1);
  float f[LANES];
  for (int l = 0; l < LANES; l++) { u32 e = s[l] >> at & 255; f[l] = e == 255 ? NAN : e ? as_f(e << 23) : 0x1p-127f; }
  for (int g = 0; g < LANES / size; g++)
    for (int h = 0; h < size; h += 16) {
      V scale = *(const V *)(f + g * size + h);
      for (int e = 0; e < 32; e++) *(V *)&t->k[32 * g + e][h] *= scale;
    }
}
static void mixed(Wave *w, const Inst *i, int size, int scaled) {
  static __thread Tile a, b;
  float acc[32][32] __attribute__((aligned(64)));
  u32 out[16][LANES];
  int groups = LANES / size, regs = size * size / LANES;
  unsigned old = denormals_on();
  unpack_f8f6f4(w, i->src[0].idx, i->cbsz, size, &a);
  unpack_f8f6f4(w, i->src[1].idx, i->blgp, size, &b);
  if (scaled) { apply_scale(w, i, 0, size, &a); apply_scale(w, i, 1, size, &b); }
  memset(acc, 0, sizeof acc);
  multiply(acc, &a, &b, size, 32 * groups);
  for (int r = 0; r < regs; r++)
    for (int l = 0; l < LANES; l++) out[r][l] = as_u(as_f(accumulator(w, i, 2, r, l)) + acc[result_row(size, r, l / size)][l % size]);
  for (int r = 0; r < regs; r++) memcpy(w->v[i->dst.idx + r], out[r], sizeof out[r]);
  denormals_back(old);
}
/* Double precision: 16x16x4 has row 4 * r + lane / 16; 4x4x4 in four blocks has lane = column + 4 * (block + 4 * row). */
static double pair_at(Wave *w, const Inst *i, int k, int r, int l) {
  const Operand *o = &i->src[k];
  return as_d(o->kind == K_VGPR ? w->v[o->idx + 2 * r][l] | (u64)w->v[o->idx + 2 * r + 1][l] << 32 : sread64(w, o));
}
static void op_v_mfma_f64_16x16x4_f64(Wave *w, const Inst *i) {
  u32 out[8][LANES];
  for (int r = 0; r < 4; r++)
    for (int l = 0; l < LANES; l++) {
      double s = pair_at(w, i, 2, r, l);
      for (int k = 0; k < 4; k++) s = fma(pair_at(w, i, 0, 0, 16 * k + 4 * r + l / 16), pair_at(w, i, 1, 0, 16 * k + l % 16), s);
      out[2 * r][l] = (u32)as_q(s); out[2 * r + 1][l] = (u32)(as_q(s) >> 32);
    }
  for (int r = 0; r < 8; r++) memcpy(w->v[i->dst.idx + r], out[r], sizeof out[r]);
}
static void op_v_mfma_f64_4x4x4_4b_f64(Wave *w, const Inst *i) {
  u32 out[2][LANES];
  for (int l = 0; l < LANES; l++) {
    int row = l / 16, block = l / 4 % 4, n = l % 4;
    double s = pair_at(w, i, 2, 0, l);
    for (int k = 0; k < 4; k++) s = fma(pair_at(w, i, 0, 0, 16 * k + 4 * block + row), pair_at(w, i, 1, 0, 16 * k + 4 * block + n), s);
    out[0][l] = (u32)as_q(s); out[1][l] = (u32)(as_q(s) >> 32);
  }
  for (int r = 0; r < 2; r++) memcpy(w->v[i->dst.idx + r], out[r], sizeof out[r]);
}

#define SQUARE_LIST(X) \
  X(v_mfma_f32_32x32x2_f32, 32, 1, T_F32, T_F32, 0) X(v_mfma_f32_16x16x4_f32, 16, 1, T_F32, T_F32, 0) \
  X(v_mfma_f32_32x32x8_f16, 32, 4, T_F16, T_F16, 0) X(v_mfma_f32_16x16x16_f16, 16, 4, T_F16, T_F16, 0) \
  X(v_mfma_f32_32x32x8_bf16, 32, 4, T_BF16, T_BF16, 0) X(v_mfma_f32_16x16x16_bf16, 16, 4, T_BF16, T_BF16, 0) \
  X(v_mfma_f32_32x32x16_f16, 32, 8, T_F16, T_F16, 0) X(v_mfma_f32_16x16x32_f16, 16, 8, T_F16, T_F16, 0) \
  X(v_mfma_f32_32x32x16_bf16, 32, 8, T_BF16, T_BF16, 0) X(v_mfma_f32_16x16x32_bf16, 16, 8, T_BF16, T_BF16, 0) \
  X(v_mfma_i32_32x32x16_i8, 32, 8, T_I8, T_I8, 1) X(v_mfma_i32_16x16x32_i8, 16, 8, T_I8, T_I8, 1) \
  X(v_mfma_i32_32x32x32_i8, 32, 16, T_I8, T_I8, 1) X(v_mfma_i32_16x16x64_i8, 16, 16, T_I8, T_I8, 1) \
  X(v_mfma_f32_16x16x32_fp8_fp8, 16, 8, T_FP8, T_FP8, 0) X(v_mfma_f32_16x16x32_fp8_bf8, 16, 8, T_FP8, T_BF8, 0) \
  X(v_mfma_f32_16x16x32_bf8_fp8, 16, 8, T_BF8, T_FP8, 0) X(v_mfma_f32_16x16x32_bf8_bf8, 16, 8, T_BF8, T_BF8, 0) \
  X(v_mfma_f32_32x32x16_fp8_fp8, 32, 8, T_FP8, T_FP8, 0) X(v_mfma_f32_32x32x16_fp8_bf8, 32, 8, T_FP8, T_BF8, 0) \
  X(v_mfma_f32_32x32x16_bf8_fp8, 32, 8, T_BF8, T_FP8, 0) X(v_mfma_f32_32x32x16_bf8_bf8, 32, 8, T_BF8, T_BF8, 0)
#define DEF_SQUARE(name, size, each, ta, tb, is_int) static void op_##name(Wave *w, const Inst *i) { square(w, i, size, each, ta, tb, is_int); }
SQUARE_LIST(DEF_SQUARE)
#define BLOCK_LIST(X) \
  X(v_mfma_f32_32x32x1_2b_f32, 32, 1, T_F32, 0) X(v_mfma_f32_16x16x1_4b_f32, 16, 1, T_F32, 0) X(v_mfma_f32_4x4x1_16b_f32, 4, 1, T_F32, 0) \
  X(v_mfma_f32_32x32x4_2b_f16, 32, 4, T_F16, 0) X(v_mfma_f32_16x16x4_4b_f16, 16, 4, T_F16, 0) X(v_mfma_f32_4x4x4_16b_f16, 4, 4, T_F16, 0) \
  X(v_mfma_f32_32x32x4_2b_bf16, 32, 4, T_BF16, 0) X(v_mfma_f32_16x16x4_4b_bf16, 16, 4, T_BF16, 0) X(v_mfma_f32_4x4x4_16b_bf16, 4, 4, T_BF16, 0) \
  X(v_mfma_i32_32x32x4_2b_i8, 32, 4, T_I8, 1) X(v_mfma_i32_16x16x4_4b_i8, 16, 4, T_I8, 1) X(v_mfma_i32_4x4x4_16b_i8, 4, 4, T_I8, 1)
#define DEF_BLOCK(name, size, each, type, is_int) static void op_##name(Wave *w, const Inst *i) { blocks(w, i, size, each, type, is_int); }
BLOCK_LIST(DEF_BLOCK)
#define MIXED_LIST(X) X(v_mfma_f32_16x16x128_f8f6f4, 16, 0) X(v_mfma_f32_32x32x64_f8f6f4, 32, 0) X(v_mfma_scale_f32_16x16x128_f8f6f4, 16, 1) X(v_mfma_scale_f32_32x32x64_f8f6f4, 32, 1)
#define DEF_MIXED(name, size, scaled) static void op_##name(Wave *w, const Inst *i) { mixed(w, i, size, scaled); }
MIXED_LIST(DEF_MIXED)

const OpEntry mfma_ops[] = {SQUARE_LIST(ENTRY) BLOCK_LIST(ENTRY) MIXED_LIST(ENTRY) ENTRY(v_mfma_f64_16x16x4_f64) ENTRY(v_mfma_f64_4x4x4_4b_f64) {0, 0}};
