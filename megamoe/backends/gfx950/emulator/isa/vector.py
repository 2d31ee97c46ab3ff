"""Opcodes of VOP1, VOP2, VOPC and of VOP3 beyond them.

Widths in dwords; `s` marks a scalar destination, `k` a scalar operand."""

from __future__ import annotations

from megamoe.backends.gfx950.emulator.isa.table import table

VOP1 = table(
    """
00 v_nop 0 0; 01 v_mov_b32 1 1; 02 v_readfirstlane_b32 s1 1; 03 v_cvt_i32_f64 1 2; 04 v_cvt_f64_i32 2 1;
05 v_cvt_f32_i32 1 1; 06 v_cvt_f32_u32 1 1; 07 v_cvt_u32_f32 1 1; 08 v_cvt_i32_f32 1 1;
0a v_cvt_f16_f32 1 1; 0b v_cvt_f32_f16 1 1; 0c v_cvt_rpi_i32_f32 1 1; 0d v_cvt_flr_i32_f32 1 1;
0e v_cvt_off_f32_i4 1 1; 0f v_cvt_f32_f64 1 2; 10 v_cvt_f64_f32 2 1; 11 v_cvt_f32_ubyte0 1 1;
12 v_cvt_f32_ubyte1 1 1; 13 v_cvt_f32_ubyte2 1 1; 14 v_cvt_f32_ubyte3 1 1; 15 v_cvt_u32_f64 1 2;
16 v_cvt_f64_u32 2 1; 17 v_trunc_f64 2 2; 18 v_ceil_f64 2 2; 19 v_rndne_f64 2 2; 1a v_floor_f64 2 2;
1b v_fract_f32 1 1; 1c v_trunc_f32 1 1; 1d v_ceil_f32 1 1; 1e v_rndne_f32 1 1; 1f v_floor_f32 1 1;
20 v_exp_f32 1 1; 21 v_log_f32 1 1; 22 v_rcp_f32 1 1; 23 v_rcp_iflag_f32 1 1; 24 v_rsq_f32 1 1;
25 v_rcp_f64 2 2; 26 v_rsq_f64 2 2; 27 v_sqrt_f32 1 1; 28 v_sqrt_f64 2 2; 29 v_sin_f32 1 1;
2a v_cos_f32 1 1; 2b v_not_b32 1 1; 2c v_bfrev_b32 1 1; 2d v_ffbh_u32 1 1; 2e v_ffbl_b32 1 1;
2f v_ffbh_i32 1 1; 30 v_frexp_exp_i32_f64 1 2; 31 v_frexp_mant_f64 2 2; 32 v_fract_f64 2 2;
33 v_frexp_exp_i32_f32 1 1; 34 v_frexp_mant_f32 1 1; 35 v_clrexcp 0 0; 37 v_screen_partition_4se_b32 1 1;
38 v_mov_b64 2 2; 39 v_cvt_f16_u16 1 1; 3a v_cvt_f16_i16 1 1; 3b v_cvt_u16_f16 1 1; 3c v_cvt_i16_f16 1 1;
3d v_rcp_f16 1 1; 3e v_sqrt_f16 1 1; 3f v_rsq_f16 1 1; 40 v_log_f16 1 1; 41 v_exp_f16 1 1;
42 v_frexp_mant_f16 1 1; 43 v_frexp_exp_i16_f16 1 1; 44 v_floor_f16 1 1; 45 v_ceil_f16 1 1;
46 v_trunc_f16 1 1; 47 v_rndne_f16 1 1; 48 v_fract_f16 1 1; 49 v_sin_f16 1 1; 4a v_cos_f16 1 1;
4b v_exp_legacy_f32 1 1; 4c v_log_legacy_f32 1 1; 4d v_cvt_norm_i16_f16 1 1; 4e v_cvt_norm_u16_f16 1 1;
4f v_sat_pk_u8_i16 1 1; 51 v_swap_b32 1 1; 52 v_accvgpr_mov_b32 1 1; 54 v_cvt_f32_fp8 1 1;
55 v_cvt_f32_bf8 1 1; 56 v_cvt_pk_f32_fp8 2 1; 57 v_cvt_pk_f32_bf8 2 1; 58 v_prng_b32 1 1;
59 v_permlane16_swap_b32 1 1; 5a v_permlane32_swap_b32 1 1; 5b v_cvt_f32_bf16 1 1
    """
)

VOP2 = table(
    """
00 v_cndmask_b32 1 1 1; 01 v_add_f32 1 1 1; 02 v_sub_f32 1 1 1; 03 v_subrev_f32 1 1 1; 04 v_fmac_f64 2 2 2;
05 v_mul_f32 1 1 1; 06 v_mul_i32_i24 1 1 1; 07 v_mul_hi_i32_i24 1 1 1; 08 v_mul_u32_u24 1 1 1;
09 v_mul_hi_u32_u24 1 1 1; 0a v_min_f32 1 1 1; 0b v_max_f32 1 1 1; 0c v_min_i32 1 1 1; 0d v_max_i32 1 1 1;
0e v_min_u32 1 1 1; 0f v_max_u32 1 1 1; 10 v_lshrrev_b32 1 1 1; 11 v_ashrrev_i32 1 1 1;
12 v_lshlrev_b32 1 1 1; 13 v_and_b32 1 1 1; 14 v_or_b32 1 1 1; 15 v_xor_b32 1 1 1;
16 v_dot2c_f32_bf16 1 1 1; 17 v_fmamk_f32 1 1 1; 18 v_fmaak_f32 1 1 1; 19 v_add_co_u32 1 1 1;
1a v_sub_co_u32 1 1 1; 1b v_subrev_co_u32 1 1 1; 1c v_addc_co_u32 1 1 1; 1d v_subb_co_u32 1 1 1;
1e v_subbrev_co_u32 1 1 1; 1f v_add_f16 1 1 1; 20 v_sub_f16 1 1 1; 21 v_subrev_f16 1 1 1;
22 v_mul_f16 1 1 1; 23 v_mac_f16 1 1 1; 26 v_add_u16 1 1 1; 27 v_sub_u16 1 1 1; 28 v_subrev_u16 1 1 1;
29 v_mul_lo_u16 1 1 1; 2a v_lshlrev_b16 1 1 1; 2b v_lshrrev_b16 1 1 1; 2c v_ashrrev_i16 1 1 1;
2d v_max_f16 1 1 1; 2e v_min_f16 1 1 1; 2f v_max_u16 1 1 1; 30 v_max_i16 1 1 1; 31 v_min_u16 1 1 1;
32 v_min_i16 1 1 1; 33 v_ldexp_f16 1 1 1; 34 v_add_u32 1 1 1; 35 v_sub_u32 1 1 1; 36 v_subrev_u32 1 1 1;
37 v_dot2c_f32_f16 1 1 1; 38 v_dot2c_i32_i16 1 1 1; 39 v_dot4c_i32_i8 1 1 1; 3a v_dot8c_i32_i4 1 1 1;
3b v_fmac_f32 1 1 1; 3c v_pk_fmac_f16 1 1 1; 3d v_xnor_b32 1 1 1;
24 v_madmk_f16 1 1 1; 25 v_madak_f16 1 1 1
    """
)

VOPC = table(
    """
10 v_cmp_class_f32 s2 1 1; 11 v_cmpx_class_f32 s2 1 1; 12 v_cmp_class_f64 s2 2 1;
13 v_cmpx_class_f64 s2 2 1; 14 v_cmp_class_f16 s2 1 1; 15 v_cmpx_class_f16 s2 1 1; 20 v_cmp_f_f16 s2 1 1;
21 v_cmp_lt_f16 s2 1 1; 22 v_cmp_eq_f16 s2 1 1; 23 v_cmp_le_f16 s2 1 1; 24 v_cmp_gt_f16 s2 1 1;
25 v_cmp_lg_f16 s2 1 1; 26 v_cmp_ge_f16 s2 1 1; 27 v_cmp_o_f16 s2 1 1; 28 v_cmp_u_f16 s2 1 1;
29 v_cmp_nge_f16 s2 1 1; 2a v_cmp_nlg_f16 s2 1 1; 2b v_cmp_ngt_f16 s2 1 1; 2c v_cmp_nle_f16 s2 1 1;
2d v_cmp_neq_f16 s2 1 1; 2e v_cmp_nlt_f16 s2 1 1; 2f v_cmp_tru_f16 s2 1 1; 30 v_cmpx_f_f16 s2 1 1;
31 v_cmpx_lt_f16 s2 1 1; 32 v_cmpx_eq_f16 s2 1 1; 33 v_cmpx_le_f16 s2 1 1; 34 v_cmpx_gt_f16 s2 1 1;
35 v_cmpx_lg_f16 s2 1 1; 36 v_cmpx_ge_f16 s2 1 1; 37 v_cmpx_o_f16 s2 1 1; 38 v_cmpx_u_f16 s2 1 1;
39 v_cmpx_nge_f16 s2 1 1; 3a v_cmpx_nlg_f16 s2 1 1; 3b v_cmpx_ngt_f16 s2 1 1; 3c v_cmpx_nle_f16 s2 1 1;
3d v_cmpx_neq_f16 s2 1 1; 3e v_cmpx_nlt_f16 s2 1 1; 3f v_cmpx_tru_f16 s2 1 1; 40 v_cmp_f_f32 s2 1 1;
41 v_cmp_lt_f32 s2 1 1; 42 v_cmp_eq_f32 s2 1 1; 43 v_cmp_le_f32 s2 1 1; 44 v_cmp_gt_f32 s2 1 1;
45 v_cmp_lg_f32 s2 1 1; 46 v_cmp_ge_f32 s2 1 1; 47 v_cmp_o_f32 s2 1 1; 48 v_cmp_u_f32 s2 1 1;
49 v_cmp_nge_f32 s2 1 1; 4a v_cmp_nlg_f32 s2 1 1; 4b v_cmp_ngt_f32 s2 1 1; 4c v_cmp_nle_f32 s2 1 1;
4d v_cmp_neq_f32 s2 1 1; 4e v_cmp_nlt_f32 s2 1 1; 4f v_cmp_tru_f32 s2 1 1; 50 v_cmpx_f_f32 s2 1 1;
51 v_cmpx_lt_f32 s2 1 1; 52 v_cmpx_eq_f32 s2 1 1; 53 v_cmpx_le_f32 s2 1 1; 54 v_cmpx_gt_f32 s2 1 1;
55 v_cmpx_lg_f32 s2 1 1; 56 v_cmpx_ge_f32 s2 1 1; 57 v_cmpx_o_f32 s2 1 1; 58 v_cmpx_u_f32 s2 1 1;
59 v_cmpx_nge_f32 s2 1 1; 5a v_cmpx_nlg_f32 s2 1 1; 5b v_cmpx_ngt_f32 s2 1 1; 5c v_cmpx_nle_f32 s2 1 1;
5d v_cmpx_neq_f32 s2 1 1; 5e v_cmpx_nlt_f32 s2 1 1; 5f v_cmpx_tru_f32 s2 1 1; 60 v_cmp_f_f64 s2 2 2;
61 v_cmp_lt_f64 s2 2 2; 62 v_cmp_eq_f64 s2 2 2; 63 v_cmp_le_f64 s2 2 2; 64 v_cmp_gt_f64 s2 2 2;
65 v_cmp_lg_f64 s2 2 2; 66 v_cmp_ge_f64 s2 2 2; 67 v_cmp_o_f64 s2 2 2; 68 v_cmp_u_f64 s2 2 2;
69 v_cmp_nge_f64 s2 2 2; 6a v_cmp_nlg_f64 s2 2 2; 6b v_cmp_ngt_f64 s2 2 2; 6c v_cmp_nle_f64 s2 2 2;
6d v_cmp_neq_f64 s2 2 2; 6e v_cmp_nlt_f64 s2 2 2; 6f v_cmp_tru_f64 s2 2 2; 70 v_cmpx_f_f64 s2 2 2;
71 v_cmpx_lt_f64 s2 2 2; 72 v_cmpx_eq_f64 s2 2 2; 73 v_cmpx_le_f64 s2 2 2; 74 v_cmpx_gt_f64 s2 2 2;
75 v_cmpx_lg_f64 s2 2 2; 76 v_cmpx_ge_f64 s2 2 2; 77 v_cmpx_o_f64 s2 2 2; 78 v_cmpx_u_f64 s2 2 2;
79 v_cmpx_nge_f64 s2 2 2; 7a v_cmpx_nlg_f64 s2 2 2; 7b v_cmpx_ngt_f64 s2 2 2; 7c v_cmpx_nle_f64 s2 2 2;
7d v_cmpx_neq_f64 s2 2 2; 7e v_cmpx_nlt_f64 s2 2 2; 7f v_cmpx_tru_f64 s2 2 2; a0 v_cmp_f_i16 s2 1 1;
a1 v_cmp_lt_i16 s2 1 1; a2 v_cmp_eq_i16 s2 1 1; a3 v_cmp_le_i16 s2 1 1; a4 v_cmp_gt_i16 s2 1 1;
a5 v_cmp_ne_i16 s2 1 1; a6 v_cmp_ge_i16 s2 1 1; a7 v_cmp_t_i16 s2 1 1; a8 v_cmp_f_u16 s2 1 1;
a9 v_cmp_lt_u16 s2 1 1; aa v_cmp_eq_u16 s2 1 1; ab v_cmp_le_u16 s2 1 1; ac v_cmp_gt_u16 s2 1 1;
ad v_cmp_ne_u16 s2 1 1; ae v_cmp_ge_u16 s2 1 1; af v_cmp_t_u16 s2 1 1; b0 v_cmpx_f_i16 s2 1 1;
b1 v_cmpx_lt_i16 s2 1 1; b2 v_cmpx_eq_i16 s2 1 1; b3 v_cmpx_le_i16 s2 1 1; b4 v_cmpx_gt_i16 s2 1 1;
b5 v_cmpx_ne_i16 s2 1 1; b6 v_cmpx_ge_i16 s2 1 1; b7 v_cmpx_t_i16 s2 1 1; b8 v_cmpx_f_u16 s2 1 1;
b9 v_cmpx_lt_u16 s2 1 1; ba v_cmpx_eq_u16 s2 1 1; bb v_cmpx_le_u16 s2 1 1; bc v_cmpx_gt_u16 s2 1 1;
bd v_cmpx_ne_u16 s2 1 1; be v_cmpx_ge_u16 s2 1 1; bf v_cmpx_t_u16 s2 1 1; c0 v_cmp_f_i32 s2 1 1;
c1 v_cmp_lt_i32 s2 1 1; c2 v_cmp_eq_i32 s2 1 1; c3 v_cmp_le_i32 s2 1 1; c4 v_cmp_gt_i32 s2 1 1;
c5 v_cmp_ne_i32 s2 1 1; c6 v_cmp_ge_i32 s2 1 1; c7 v_cmp_t_i32 s2 1 1; c8 v_cmp_f_u32 s2 1 1;
c9 v_cmp_lt_u32 s2 1 1; ca v_cmp_eq_u32 s2 1 1; cb v_cmp_le_u32 s2 1 1; cc v_cmp_gt_u32 s2 1 1;
cd v_cmp_ne_u32 s2 1 1; ce v_cmp_ge_u32 s2 1 1; cf v_cmp_t_u32 s2 1 1; d0 v_cmpx_f_i32 s2 1 1;
d1 v_cmpx_lt_i32 s2 1 1; d2 v_cmpx_eq_i32 s2 1 1; d3 v_cmpx_le_i32 s2 1 1; d4 v_cmpx_gt_i32 s2 1 1;
d5 v_cmpx_ne_i32 s2 1 1; d6 v_cmpx_ge_i32 s2 1 1; d7 v_cmpx_t_i32 s2 1 1; d8 v_cmpx_f_u32 s2 1 1;
d9 v_cmpx_lt_u32 s2 1 1; da v_cmpx_eq_u32 s2 1 1; db v_cmpx_le_u32 s2 1 1; dc v_cmpx_gt_u32 s2 1 1;
dd v_cmpx_ne_u32 s2 1 1; de v_cmpx_ge_u32 s2 1 1; df v_cmpx_t_u32 s2 1 1; e0 v_cmp_f_i64 s2 2 2;
e1 v_cmp_lt_i64 s2 2 2; e2 v_cmp_eq_i64 s2 2 2; e3 v_cmp_le_i64 s2 2 2; e4 v_cmp_gt_i64 s2 2 2;
e5 v_cmp_ne_i64 s2 2 2; e6 v_cmp_ge_i64 s2 2 2; e7 v_cmp_t_i64 s2 2 2; e8 v_cmp_f_u64 s2 2 2;
e9 v_cmp_lt_u64 s2 2 2; ea v_cmp_eq_u64 s2 2 2; eb v_cmp_le_u64 s2 2 2; ec v_cmp_gt_u64 s2 2 2;
ed v_cmp_ne_u64 s2 2 2; ee v_cmp_ge_u64 s2 2 2; ef v_cmp_t_u64 s2 2 2; f0 v_cmpx_f_i64 s2 2 2;
f1 v_cmpx_lt_i64 s2 2 2; f2 v_cmpx_eq_i64 s2 2 2; f3 v_cmpx_le_i64 s2 2 2; f4 v_cmpx_gt_i64 s2 2 2;
f5 v_cmpx_ne_i64 s2 2 2; f6 v_cmpx_ge_i64 s2 2 2; f7 v_cmpx_t_i64 s2 2 2; f8 v_cmpx_f_u64 s2 2 2;
f9 v_cmpx_lt_u64 s2 2 2; fa v_cmpx_eq_u64 s2 2 2; fb v_cmpx_le_u64 s2 2 2; fc v_cmpx_gt_u64 s2 2 2;
fd v_cmpx_ne_u64 s2 2 2; fe v_cmpx_ge_u64 s2 2 2; ff v_cmpx_t_u64 s2 2 2
    """
)

VOP3 = table(
    """
1c2 v_mad_i32_i24 1 1 1 1; 1c3 v_mad_u32_u24 1 1 1 1; 1c4 v_cubeid_f32 1 1 1 1; 1c8 v_bfe_u32 1 1 1 1;
1c9 v_bfe_i32 1 1 1 1; 1ca v_bfi_b32 1 1 1 1; 1cb v_fma_f32 1 1 1 1; 1cc v_fma_f64 2 2 2 2;
1cd v_lerp_u8 1 1 1 1; 1ce v_alignbit_b32 1 1 1 1; 1cf v_alignbyte_b32 1 1 1 1; 1d0 v_min3_f32 1 1 1 1;
1d1 v_min3_i32 1 1 1 1; 1d2 v_min3_u32 1 1 1 1; 1d3 v_max3_f32 1 1 1 1; 1d4 v_max3_i32 1 1 1 1;
1d5 v_max3_u32 1 1 1 1; 1d6 v_med3_f32 1 1 1 1; 1d7 v_med3_i32 1 1 1 1; 1d8 v_med3_u32 1 1 1 1;
1d9 v_sad_u8 1 1 1 1; 1da v_sad_hi_u8 1 1 1 1; 1db v_sad_u16 1 1 1 1; 1dc v_sad_u32 1 1 1 1;
1dd v_cvt_pk_u8_f32 1 1 1 1; 1de v_div_fixup_f32 1 1 1 1; 1df v_div_fixup_f64 2 2 2 2;
1e0 v_div_scale_f32 1 k2 1 1 1; 1e1 v_div_scale_f64 2 k2 2 2 2; 1e2 v_div_fmas_f32 1 1 1 1;
1e3 v_div_fmas_f64 2 2 2 2; 1e4 v_msad_u8 1 1 1 1; 1e5 v_qsad_pk_u16_u8 2 2 1 2;
1e6 v_mqsad_pk_u16_u8 2 2 1 2; 1e7 v_mqsad_u32_u8 4 2 1 4; 1e8 v_mad_u64_u32 2 k2 1 1 2;
1e9 v_mad_i64_i32 2 k2 1 1 2; 1ed v_perm_b32 1 1 1 1; 1f1 v_mad_u32_u16 1 1 1 1; 1f2 v_mad_i32_i16 1 1 1 1;
1f3 v_xad_u32 1 1 1 1; 1f4 v_min3_f16 1 1 1 1; 1f5 v_min3_i16 1 1 1 1; 1f6 v_min3_u16 1 1 1 1;
1f7 v_max3_f16 1 1 1 1; 1f8 v_max3_i16 1 1 1 1; 1f9 v_max3_u16 1 1 1 1; 1fa v_med3_f16 1 1 1 1;
1fb v_med3_i16 1 1 1 1; 1fc v_med3_u16 1 1 1 1; 1fd v_lshl_add_u32 1 1 1 1; 1fe v_add_lshl_u32 1 1 1 1;
1ff v_add3_u32 1 1 1 1; 200 v_lshl_or_b32 1 1 1 1; 201 v_and_or_b32 1 1 1 1; 202 v_or3_b32 1 1 1 1;
203 v_mad_f16 1 1 1 1; 204 v_mad_u16 1 1 1 1; 205 v_mad_i16 1 1 1 1; 206 v_fma_f16 1 1 1 1;
207 v_div_fixup_f16 1 1 1 1; 208 v_lshl_add_u64 2 2 1 2; 233 v_bitop3_b16 1 1 1 1; 234 v_bitop3_b32 1 1 1 1;
235 v_cvt_scalef32_pk_fp8_f32 1 1 1 1; 236 v_cvt_scalef32_pk_bf8_f32 1 1 1 1;
237 v_cvt_scalef32_sr_fp8_f32 1 1 1 1; 238 v_cvt_scalef32_sr_bf8_f32 1 1 1 1;
239 v_cvt_scalef32_pk_f32_fp8 2 1 1; 23a v_cvt_scalef32_pk_f32_bf8 2 1 1; 23b v_cvt_scalef32_f32_fp8 1 1 1;
23c v_cvt_scalef32_f32_bf8 1 1 1; 23d v_cvt_scalef32_pk_fp4_f32 1 1 1 1;
23e v_cvt_scalef32_sr_pk_fp4_f32 1 2 1 1; 23f v_cvt_scalef32_pk_f32_fp4 2 1 1;
240 v_cvt_scalef32_pk_fp8_f16 1 1 1; 241 v_cvt_scalef32_pk_bf8_f16 1 1 1;
242 v_cvt_scalef32_sr_fp8_f16 1 1 1 1; 243 v_cvt_scalef32_sr_bf8_f16 1 1 1 1;
244 v_cvt_scalef32_pk_fp8_bf16 1 1 1; 245 v_cvt_scalef32_pk_bf8_bf16 1 1 1;
246 v_cvt_scalef32_sr_fp8_bf16 1 1 1 1; 247 v_cvt_scalef32_sr_bf8_bf16 1 1 1 1;
248 v_cvt_scalef32_pk_f16_fp8 1 1 1; 249 v_cvt_scalef32_pk_f16_bf8 1 1 1; 24a v_cvt_scalef32_f16_fp8 1 1 1;
24b v_cvt_scalef32_f16_bf8 1 1 1; 24c v_cvt_scalef32_pk_fp4_f16 1 1 1; 24d v_cvt_scalef32_pk_fp4_bf16 1 1 1;
24e v_cvt_scalef32_sr_pk_fp4_f16 1 1 1 1; 24f v_cvt_scalef32_sr_pk_fp4_bf16 1 1 1 1;
250 v_cvt_scalef32_pk_f16_fp4 1 1 1; 251 v_cvt_scalef32_pk_bf16_fp4 1 1 1;
252 v_cvt_scalef32_2xpk16_fp6_f32 6 16 16 1; 253 v_cvt_scalef32_2xpk16_bf6_f32 6 16 16 1;
254 v_cvt_scalef32_sr_pk32_fp6_f32 6 32 1 1; 255 v_cvt_scalef32_sr_pk32_bf6_f32 6 32 1 1;
256 v_cvt_scalef32_pk32_f32_fp6 32 6 1; 257 v_cvt_scalef32_pk32_f32_bf6 32 6 1;
258 v_cvt_scalef32_pk32_fp6_f16 6 16 1; 259 v_cvt_scalef32_pk32_fp6_bf16 6 16 1;
25a v_cvt_scalef32_pk32_bf6_f16 6 16 1; 25b v_cvt_scalef32_pk32_bf6_bf16 6 16 1;
25c v_cvt_scalef32_sr_pk32_fp6_f16 6 16 1 1; 25d v_cvt_scalef32_sr_pk32_fp6_bf16 6 16 1 1;
25e v_cvt_scalef32_sr_pk32_bf6_f16 6 16 1 1; 25f v_cvt_scalef32_sr_pk32_bf6_bf16 6 16 1 1;
260 v_cvt_scalef32_pk32_f16_fp6 16 6 1; 261 v_cvt_scalef32_pk32_bf16_fp6 16 6 1;
262 v_cvt_scalef32_pk32_f16_bf6 16 6 1; 263 v_cvt_scalef32_pk32_bf16_bf6 16 6 1;
265 v_ashr_pk_i8_i32 1 1 1 1; 266 v_ashr_pk_u8_i32 1 1 1 1; 267 v_cvt_pk_f16_f32 1 1 1;
268 v_cvt_pk_bf16_f32 1 1 1; 269 v_cvt_scalef32_pk_bf16_fp8 1 1 1; 26a v_cvt_scalef32_pk_bf16_bf8 1 1 1;
280 v_add_f64 2 2 2; 281 v_mul_f64 2 2 2; 282 v_min_f64 2 2 2; 283 v_max_f64 2 2 2; 284 v_ldexp_f64 2 2 1;
285 v_mul_lo_u32 1 1 1; 286 v_mul_hi_u32 1 1 1; 287 v_mul_hi_i32 1 1 1; 288 v_ldexp_f32 1 1 1;
289 v_readlane_b32 s1 1 k1; 28b v_bcnt_u32_b32 1 1 1; 28c v_mbcnt_lo_u32_b32 1 1 1;
28d v_mbcnt_hi_u32_b32 1 1 1; 28f v_lshlrev_b64 2 1 2; 290 v_lshrrev_b64 2 1 2; 291 v_ashrrev_i64 2 1 2;
292 v_trig_preop_f64 2 2 1; 293 v_bfm_b32 1 1 1; 294 v_cvt_pknorm_i16_f32 1 1 1;
295 v_cvt_pknorm_u16_f32 1 1 1; 296 v_cvt_pkrtz_f16_f32 1 1 1; 297 v_cvt_pk_u16_u32 1 1 1;
298 v_cvt_pk_i16_i32 1 1 1; 299 v_cvt_pknorm_i16_f16 1 1 1; 29a v_cvt_pknorm_u16_f16 1 1 1;
29c v_add_i32 1 1 1; 29d v_sub_i32 1 1 1; 29e v_add_i16 1 1 1; 29f v_sub_i16 1 1 1;
2a0 v_pack_b32_f16 1 1 1; 2a1 v_mul_legacy_f32 1 1 1; 2a2 v_cvt_pk_fp8_f32 1 1 1;
2a3 v_cvt_pk_bf8_f32 1 1 1; 2a4 v_cvt_sr_fp8_f32 1 1 1; 2a5 v_cvt_sr_bf8_f32 1 1 1;
2a6 v_cvt_sr_f16_f32 1 1 1; 2a7 v_cvt_sr_bf16_f32 1 1 1; 2a8 v_minimum3_f32 1 1 1 1;
2a9 v_maximum3_f32 1 1 1 1; 28a v_writelane_b32 1 k1 k1;
1c5 v_cubesc_f32 1 1 1 1; 1c6 v_cubetc_f32 1 1 1 1; 1c7 v_cubema_f32 1 1 1 1; 1ea v_mad_legacy_f16 1 1 1 1;
1eb v_mad_legacy_u16 1 1 1 1; 1ec v_mad_legacy_i16 1 1 1 1; 1ee v_fma_legacy_f16 1 1 1 1; 1ef
v_div_fixup_legacy_f16 1 1 1 1; 1f0 v_cvt_pkaccum_u8_f32 1 1 1
    """
)
