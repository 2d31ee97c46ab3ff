"""Opcodes of VOP3P: packed arithmetic, dot products and matrix instructions. Widths in dwords."""

from __future__ import annotations

from megamoe.backends.gfx950.emulator.isa.table import table

VOP3P = table(
    """
00 v_pk_mad_i16 1 1 1 1; 01 v_pk_mul_lo_u16 1 1 1; 02 v_pk_add_i16 1 1 1; 03 v_pk_sub_i16 1 1 1;
04 v_pk_lshlrev_b16 1 1 1; 05 v_pk_lshrrev_b16 1 1 1; 06 v_pk_ashrrev_i16 1 1 1; 07 v_pk_max_i16 1 1 1;
08 v_pk_min_i16 1 1 1; 09 v_pk_mad_u16 1 1 1 1; 0a v_pk_add_u16 1 1 1; 0b v_pk_sub_u16 1 1 1;
0c v_pk_max_u16 1 1 1; 0d v_pk_min_u16 1 1 1; 0e v_pk_fma_f16 1 1 1 1; 0f v_pk_add_f16 1 1 1;
10 v_pk_mul_f16 1 1 1; 11 v_pk_min_f16 1 1 1; 12 v_pk_max_f16 1 1 1; 1a v_dot2_f32_bf16 1 1 1 1;
1b v_pk_minimum3_f16 1 1 1 1; 1c v_pk_maximum3_f16 1 1 1 1; 20 v_fma_mix_f32 1 1 1 1;
21 v_fma_mixlo_f16 1 1 1 1; 22 v_fma_mixhi_f16 1 1 1 1; 23 v_dot2_f32_f16 1 1 1 1;
26 v_dot2_i32_i16 1 1 1 1; 27 v_dot2_u32_u16 1 1 1 1; 28 v_dot4_i32_i8 1 1 1 1; 29 v_dot4_u32_u8 1 1 1 1;
2a v_dot8_i32_i4 1 1 1 1; 2b v_dot8_u32_u4 1 1 1 1; 2d v_mfma_f32_16x16x128_f8f6f4 4 8 8 4;
2e v_mfma_f32_32x32x64_f8f6f4 16 8 8 16; 30 v_pk_fma_f32 2 2 2 2; 31 v_pk_mul_f32 2 2 2;
32 v_pk_add_f32 2 2 2; 33 v_pk_mov_b32 2 2 2; 35 v_mfma_f32_16x16x32_bf16 4 4 4 4;
36 v_mfma_i32_16x16x64_i8 4 4 4 4; 37 v_mfma_f32_32x32x16_bf16 16 4 4 16;
38 v_mfma_i32_32x32x32_i8 16 4 4 16; 40 v_mfma_f32_32x32x1_2b_f32 32 1 1 32;
41 v_mfma_f32_16x16x1_4b_f32 16 1 1 16; 42 v_mfma_f32_4x4x1_16b_f32 4 1 1 4;
44 v_mfma_f32_32x32x2_f32 16 1 1 16; 45 v_mfma_f32_16x16x4_f32 4 1 1 4;
48 v_mfma_f32_32x32x4_2b_f16 32 2 2 32; 49 v_mfma_f32_16x16x4_4b_f16 16 2 2 16;
4a v_mfma_f32_4x4x4_16b_f16 4 2 2 4; 4c v_mfma_f32_32x32x8_f16 16 2 2 16;
4d v_mfma_f32_16x16x16_f16 4 2 2 4; 50 v_mfma_i32_32x32x4_2b_i8 32 1 1 32;
51 v_mfma_i32_16x16x4_4b_i8 16 1 1 16; 52 v_mfma_i32_4x4x4_16b_i8 4 1 1 4;
54 v_mfma_f32_16x16x32_f16 4 4 4 4; 55 v_mfma_f32_32x32x16_f16 16 4 4 16;
56 v_mfma_i32_32x32x16_i8 16 2 2 16; 57 v_mfma_i32_16x16x32_i8 4 2 2 4;
5d v_mfma_f32_32x32x4_2b_bf16 32 2 2 32; 5e v_mfma_f32_16x16x4_4b_bf16 16 2 2 16;
5f v_mfma_f32_4x4x4_16b_bf16 4 2 2 4; 60 v_mfma_f32_32x32x8_bf16 16 2 2 16;
61 v_mfma_f32_16x16x16_bf16 4 2 2 4; 6e v_mfma_f64_16x16x4_f64 8 2 2 8; 6f v_mfma_f64_4x4x4_4b_f64 2 2 2 2;
70 v_mfma_f32_16x16x32_bf8_bf8 4 2 2 4; 71 v_mfma_f32_16x16x32_bf8_fp8 4 2 2 4;
72 v_mfma_f32_16x16x32_fp8_bf8 4 2 2 4; 73 v_mfma_f32_16x16x32_fp8_fp8 4 2 2 4;
74 v_mfma_f32_32x32x16_bf8_bf8 16 2 2 16; 75 v_mfma_f32_32x32x16_bf8_fp8 16 2 2 16;
76 v_mfma_f32_32x32x16_fp8_bf8 16 2 2 16; 77 v_mfma_f32_32x32x16_fp8_fp8 16 2 2 16;
39 v_smfmac_f32_16x16x64_bf16 4 4 8 1; 3a v_smfmac_i32_16x16x128_i8 4 4 8 1; 3b
v_smfmac_f32_16x16x128_bf8_bf8 4 4 8 1; 3c v_smfmac_f32_16x16x128_bf8_fp8 4 4 8 1; 3d
v_smfmac_f32_16x16x128_fp8_bf8 4 4 8 1; 43 v_smfmac_f32_16x16x128_fp8_fp8 4 4 8 1; 46
v_smfmac_f32_32x32x32_bf16 16 4 8 1; 47 v_smfmac_i32_32x32x64_i8 16 4 8 1; 4b v_smfmac_f32_32x32x64_bf8_bf8
16 4 8 1; 4e v_smfmac_f32_32x32x64_bf8_fp8 16 4 8 1; 4f v_smfmac_f32_32x32x64_fp8_bf8 16 4 8 1; 53
v_smfmac_f32_32x32x64_fp8_fp8 16 4 8 1; 5a v_smfmac_f32_16x16x64_f16 4 4 8 1; 5b v_smfmac_f32_32x32x32_f16
16 4 8 1; 62 v_smfmac_f32_16x16x32_f16 4 2 4 1; 64 v_smfmac_f32_32x32x16_f16 16 2 4 1; 66
v_smfmac_f32_16x16x32_bf16 4 2 4 1; 68 v_smfmac_f32_32x32x16_bf16 16 2 4 1; 6a v_smfmac_i32_16x16x64_i8 4 2
4 1; 6c v_smfmac_i32_32x32x32_i8 16 2 4 1; 78 v_smfmac_f32_16x16x64_bf8_bf8 4 2 4 1; 79
v_smfmac_f32_16x16x64_bf8_fp8 4 2 4 1; 7a v_smfmac_f32_16x16x64_fp8_bf8 4 2 4 1; 7b
v_smfmac_f32_16x16x64_fp8_fp8 4 2 4 1; 7c v_smfmac_f32_32x32x32_bf8_bf8 16 2 4 1; 7d
v_smfmac_f32_32x32x32_bf8_fp8 16 2 4 1; 7e v_smfmac_f32_32x32x32_fp8_bf8 16 2 4 1; 7f
v_smfmac_f32_32x32x32_fp8_fp8 16 2 4 1
    """
)
