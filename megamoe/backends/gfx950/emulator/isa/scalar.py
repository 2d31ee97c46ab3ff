"""Opcodes of the scalar encodings.

A row is `opcode (hex) mnemonic`, then the widths of destination and sources in dwords."""

from __future__ import annotations

from megamoe.backends.gfx950.emulator.isa.table import table

SOP2 = table(
    """
00 s_add_u32 1 1 1; 01 s_sub_u32 1 1 1; 02 s_add_i32 1 1 1; 03 s_sub_i32 1 1 1; 04 s_addc_u32 1 1 1;
05 s_subb_u32 1 1 1; 06 s_min_i32 1 1 1; 07 s_min_u32 1 1 1; 08 s_max_i32 1 1 1; 09 s_max_u32 1 1 1;
0a s_cselect_b32 1 1 1; 0b s_cselect_b64 2 2 2; 0c s_and_b32 1 1 1; 0d s_and_b64 2 2 2; 0e s_or_b32 1 1 1;
0f s_or_b64 2 2 2; 10 s_xor_b32 1 1 1; 11 s_xor_b64 2 2 2; 12 s_andn2_b32 1 1 1; 13 s_andn2_b64 2 2 2;
14 s_orn2_b32 1 1 1; 15 s_orn2_b64 2 2 2; 16 s_nand_b32 1 1 1; 17 s_nand_b64 2 2 2; 18 s_nor_b32 1 1 1;
19 s_nor_b64 2 2 2; 1a s_xnor_b32 1 1 1; 1b s_xnor_b64 2 2 2; 1c s_lshl_b32 1 1 1; 1d s_lshl_b64 2 2 1;
1e s_lshr_b32 1 1 1; 1f s_lshr_b64 2 2 1; 20 s_ashr_i32 1 1 1; 21 s_ashr_i64 2 2 1; 22 s_bfm_b32 1 1 1;
23 s_bfm_b64 2 1 1; 24 s_mul_i32 1 1 1; 25 s_bfe_u32 1 1 1; 26 s_bfe_i32 1 1 1; 27 s_bfe_u64 2 2 1;
28 s_bfe_i64 2 2 1; 2a s_absdiff_i32 1 1 1; 2c s_mul_hi_u32 1 1 1; 2d s_mul_hi_i32 1 1 1;
2e s_lshl1_add_u32 1 1 1; 2f s_lshl2_add_u32 1 1 1; 30 s_lshl3_add_u32 1 1 1; 31 s_lshl4_add_u32 1 1 1;
32 s_pack_ll_b32_b16 1 1 1; 33 s_pack_lh_b32_b16 1 1 1; 34 s_pack_hh_b32_b16 1 1 1;
29 s_cbranch_g_fork 0 2 2; 2b s_rfe_restore_b64 0 2 1
    """
)

SOP1 = table(
    """
00 s_mov_b32 1 1; 01 s_mov_b64 2 2; 02 s_cmov_b32 1 1; 03 s_cmov_b64 2 2; 04 s_not_b32 1 1;
05 s_not_b64 2 2; 06 s_wqm_b32 1 1; 07 s_wqm_b64 2 2; 08 s_brev_b32 1 1; 09 s_brev_b64 2 2;
0a s_bcnt0_i32_b32 1 1; 0b s_bcnt0_i32_b64 1 2; 0c s_bcnt1_i32_b32 1 1; 0d s_bcnt1_i32_b64 1 2;
0e s_ff0_i32_b32 1 1; 0f s_ff0_i32_b64 1 2; 10 s_ff1_i32_b32 1 1; 11 s_ff1_i32_b64 1 2;
12 s_flbit_i32_b32 1 1; 13 s_flbit_i32_b64 1 2; 14 s_flbit_i32 1 1; 15 s_flbit_i32_i64 1 2;
16 s_sext_i32_i8 1 1; 17 s_sext_i32_i16 1 1; 18 s_bitset0_b32 1 1; 19 s_bitset0_b64 2 1;
1a s_bitset1_b32 1 1; 1b s_bitset1_b64 2 1; 1c s_getpc_b64 2 0; 1d s_setpc_b64 0 2; 1e s_swappc_b64 2 2;
1f s_rfe_b64 0 2; 20 s_and_saveexec_b64 2 2; 21 s_or_saveexec_b64 2 2; 22 s_xor_saveexec_b64 2 2;
23 s_andn2_saveexec_b64 2 2; 24 s_orn2_saveexec_b64 2 2; 25 s_nand_saveexec_b64 2 2;
26 s_nor_saveexec_b64 2 2; 27 s_xnor_saveexec_b64 2 2; 28 s_quadmask_b32 1 1; 29 s_quadmask_b64 2 2;
2a s_movrels_b32 1 1; 2b s_movrels_b64 2 2; 2c s_movreld_b32 1 1; 2d s_movreld_b64 2 2; 30 s_abs_i32 1 1;
33 s_andn1_saveexec_b64 2 2; 34 s_orn1_saveexec_b64 2 2; 35 s_andn1_wrexec_b64 2 2;
36 s_andn2_wrexec_b64 2 2; 37 s_bitreplicate_b64_b32 2 1;
2e s_cbranch_join 0 1; 32 s_set_gpr_idx_idx 0 1
    """
)

SOPC = table(
    """
00 s_cmp_eq_i32 0 1 1; 01 s_cmp_lg_i32 0 1 1; 02 s_cmp_gt_i32 0 1 1; 03 s_cmp_ge_i32 0 1 1;
04 s_cmp_lt_i32 0 1 1; 05 s_cmp_le_i32 0 1 1; 06 s_cmp_eq_u32 0 1 1; 07 s_cmp_lg_u32 0 1 1;
08 s_cmp_gt_u32 0 1 1; 09 s_cmp_ge_u32 0 1 1; 0a s_cmp_lt_u32 0 1 1; 0b s_cmp_le_u32 0 1 1;
0c s_bitcmp0_b32 0 1 1; 0d s_bitcmp1_b32 0 1 1; 0e s_bitcmp0_b64 0 2 1; 0f s_bitcmp1_b64 0 2 1;
12 s_cmp_eq_u64 0 2 2; 13 s_cmp_lg_u64 0 2 2;
10 s_setvskip 0 1 1; 11 s_set_gpr_idx_on 0 1
    """
)

SOPK = table(
    """
00 s_movk_i32 1; 01 s_cmovk_i32 1; 02 s_cmpk_eq_i32 0; 03 s_cmpk_lg_i32 0; 04 s_cmpk_gt_i32 0;
05 s_cmpk_ge_i32 0; 06 s_cmpk_lt_i32 0; 07 s_cmpk_le_i32 0; 08 s_cmpk_eq_u32 0; 09 s_cmpk_lg_u32 0;
0a s_cmpk_gt_u32 0; 0b s_cmpk_ge_u32 0; 0c s_cmpk_lt_u32 0; 0d s_cmpk_le_u32 0; 0e s_addk_i32 1;
0f s_mulk_i32 1; 11 s_getreg_b32 1; 12 s_setreg_b32 0; 14 s_setreg_imm32_b32 0; 15 s_call_b64 2;
10 s_cbranch_i_fork 2
    """
)

SOPP = table(
    """
00 s_nop; 01 s_endpgm; 02 s_branch; 03 s_wakeup; 04 s_cbranch_scc0; 05 s_cbranch_scc1; 06 s_cbranch_vccz;
07 s_cbranch_vccnz; 08 s_cbranch_execz; 09 s_cbranch_execnz; 0a s_barrier; 0b s_setkill; 0c s_waitcnt;
0d s_sethalt; 0e s_sleep; 0f s_setprio; 10 s_sendmsg; 11 s_sendmsghalt; 12 s_trap; 13 s_icache_inv;
14 s_incperflevel; 15 s_decperflevel; 16 s_ttracedata; 1b s_endpgm_saved; 1c s_set_gpr_idx_off;
1e s_endpgm_ordered_ps_done;
17 s_cbranch_cdbgsys; 18 s_cbranch_cdbguser; 19 s_cbranch_cdbgsys_or_user; 1a s_cbranch_cdbgsys_and_user; 1d
s_set_gpr_idx_mode
    """
)

SMEM = table(
    """
00 s_load_dword 1; 01 s_load_dwordx2 2; 02 s_load_dwordx4 4; 03 s_load_dwordx8 8; 04 s_load_dwordx16 16;
05 s_scratch_load_dword 1; 08 s_buffer_load_dword 1; 09 s_buffer_load_dwordx2 2; 0a s_buffer_load_dwordx4 4;
0b s_buffer_load_dwordx8 8; 0c s_buffer_load_dwordx16 16; 10 s_store_dword 1; 20 s_dcache_inv 0;
21 s_dcache_wb 0; 22 s_dcache_inv_vol 0; 23 s_dcache_wb_vol 0; 24 s_memtime 2; 25 s_memrealtime 2;
06 s_scratch_load_dwordx2 2; 07 s_scratch_load_dwordx4 4; 11 s_store_dwordx2 2; 12 s_store_dwordx4 4; 15
s_scratch_store_dword 1; 16 s_scratch_store_dwordx2 2; 17 s_scratch_store_dwordx4 4; 18 s_buffer_store_dword
1; 19 s_buffer_store_dwordx2 2; 1a s_buffer_store_dwordx4 4; 26 s_atc_probe 0; 27 s_atc_probe_buffer 0; 28
s_dcache_discard 0; 29 s_dcache_discard_x2 0; 40 s_buffer_atomic_swap 1; 41 s_buffer_atomic_cmpswap 2; 42
s_buffer_atomic_add 1; 43 s_buffer_atomic_sub 1; 44 s_buffer_atomic_smin 1; 45 s_buffer_atomic_umin 1; 46
s_buffer_atomic_smax 1; 47 s_buffer_atomic_umax 1; 48 s_buffer_atomic_and 1; 49 s_buffer_atomic_or 1; 4a
s_buffer_atomic_xor 1; 4b s_buffer_atomic_inc 1; 4c s_buffer_atomic_dec 1; 60 s_buffer_atomic_swap_x2 2; 61
s_buffer_atomic_cmpswap_x2 4; 62 s_buffer_atomic_add_x2 2; 63 s_buffer_atomic_sub_x2 2; 64
s_buffer_atomic_smin_x2 2; 65 s_buffer_atomic_umin_x2 2; 66 s_buffer_atomic_smax_x2 2; 67
s_buffer_atomic_umax_x2 2; 68 s_buffer_atomic_and_x2 2; 69 s_buffer_atomic_or_x2 2; 6a
s_buffer_atomic_xor_x2 2; 6b s_buffer_atomic_inc_x2 2; 6c s_buffer_atomic_dec_x2 2; 80 s_atomic_swap 1; 81
s_atomic_cmpswap 2; 82 s_atomic_add 1; 83 s_atomic_sub 1; 84 s_atomic_smin 1; 85 s_atomic_umin 1; 86
s_atomic_smax 1; 87 s_atomic_umax 1; 88 s_atomic_and 1; 89 s_atomic_or 1; 8a s_atomic_xor 1; 8b s_atomic_inc
1; 8c s_atomic_dec 1; a0 s_atomic_swap_x2 2; a1 s_atomic_cmpswap_x2 4; a2 s_atomic_add_x2 2; a3
s_atomic_sub_x2 2; a4 s_atomic_smin_x2 2; a5 s_atomic_umin_x2 2; a6 s_atomic_smax_x2 2; a7 s_atomic_umax_x2
2; a8 s_atomic_and_x2 2; a9 s_atomic_or_x2 2; aa s_atomic_xor_x2 2; ab s_atomic_inc_x2 2; ac s_atomic_dec_x2
2
    """
)
