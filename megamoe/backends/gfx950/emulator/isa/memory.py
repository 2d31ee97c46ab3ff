"""Opcodes of the memory encodings, widths in dwords: result and data; for DS result, address, data0, data1."""

from __future__ import annotations

from megamoe.backends.gfx950.emulator.isa.table import table

DS = table(
    """
00 ds_add_u32 0 1 1 0; 01 ds_sub_u32 0 1 1 0; 02 ds_rsub_u32 0 1 1 0; 03 ds_inc_u32 0 1 1 0;
04 ds_dec_u32 0 1 1 0; 05 ds_min_i32 0 1 1 0; 06 ds_max_i32 0 1 1 0; 07 ds_min_u32 0 1 1 0;
08 ds_max_u32 0 1 1 0; 09 ds_and_b32 0 1 1 0; 0a ds_or_b32 0 1 1 0; 0b ds_xor_b32 0 1 1 0;
0c ds_mskor_b32 0 1 1 1; 0d ds_write_b32 0 1 1 0; 0e ds_write2_b32 0 1 1 1; 0f ds_write2st64_b32 0 1 1 1;
10 ds_cmpst_b32 0 1 1 1; 11 ds_cmpst_f32 0 1 1 1; 12 ds_min_f32 0 1 1 0; 13 ds_max_f32 0 1 1 0;
14 ds_nop 0 0 0 0; 15 ds_add_f32 0 1 1 0; 17 ds_pk_add_f16 0 1 1 0; 18 ds_pk_add_bf16 0 1 1 0;
1d ds_write_addtid_b32 0 0 1 0; 1e ds_write_b8 0 1 1 0; 1f ds_write_b16 0 1 1 0; 20 ds_add_rtn_u32 1 1 1 0;
21 ds_sub_rtn_u32 1 1 1 0; 22 ds_rsub_rtn_u32 1 1 1 0; 23 ds_inc_rtn_u32 1 1 1 0; 24 ds_dec_rtn_u32 1 1 1 0;
25 ds_min_rtn_i32 1 1 1 0; 26 ds_max_rtn_i32 1 1 1 0; 27 ds_min_rtn_u32 1 1 1 0; 28 ds_max_rtn_u32 1 1 1 0;
29 ds_and_rtn_b32 1 1 1 0; 2a ds_or_rtn_b32 1 1 1 0; 2b ds_xor_rtn_b32 1 1 1 0; 2c ds_mskor_rtn_b32 1 1 1 1;
2d ds_wrxchg_rtn_b32 1 1 1 0; 2e ds_wrxchg2_rtn_b32 2 1 1 1; 2f ds_wrxchg2st64_rtn_b32 2 1 1 1;
30 ds_cmpst_rtn_b32 1 1 1 1; 31 ds_cmpst_rtn_f32 1 1 1 1; 32 ds_min_rtn_f32 1 1 1 0;
33 ds_max_rtn_f32 1 1 1 0; 35 ds_add_rtn_f32 1 1 1 0; 36 ds_read_b32 1 1 0 0; 37 ds_read2_b32 2 1 0 0;
38 ds_read2st64_b32 2 1 0 0; 39 ds_read_i8 1 1 0 0; 3a ds_read_u8 1 1 0 0; 3b ds_read_i16 1 1 0 0;
3c ds_read_u16 1 1 0 0; 3d ds_swizzle_b32 1 1 0 0; 3e ds_permute_b32 1 1 1 0; 3f ds_bpermute_b32 1 1 1 0;
40 ds_add_u64 0 1 2 0; 41 ds_sub_u64 0 1 2 0; 42 ds_rsub_u64 0 1 2 0; 43 ds_inc_u64 0 1 2 0;
44 ds_dec_u64 0 1 2 0; 45 ds_min_i64 0 1 2 0; 46 ds_max_i64 0 1 2 0; 47 ds_min_u64 0 1 2 0;
48 ds_max_u64 0 1 2 0; 49 ds_and_b64 0 1 2 0; 4a ds_or_b64 0 1 2 0; 4b ds_xor_b64 0 1 2 0;
4c ds_mskor_b64 0 1 2 2; 4d ds_write_b64 0 1 2 0; 4e ds_write2_b64 0 1 2 2; 4f ds_write2st64_b64 0 1 2 2;
50 ds_cmpst_b64 0 1 2 2; 51 ds_cmpst_f64 0 1 2 2; 52 ds_min_f64 0 1 2 0; 53 ds_max_f64 0 1 2 0;
54 ds_write_b8_d16_hi 0 1 1 0; 55 ds_write_b16_d16_hi 0 1 1 0; 56 ds_read_u8_d16 1 1 0 0;
57 ds_read_u8_d16_hi 1 1 0 0; 58 ds_read_i8_d16 1 1 0 0; 59 ds_read_i8_d16_hi 1 1 0 0;
5a ds_read_u16_d16 1 1 0 0; 5b ds_read_u16_d16_hi 1 1 0 0; 5c ds_add_f64 0 1 2 0; 60 ds_add_rtn_u64 2 1 2 0;
61 ds_sub_rtn_u64 2 1 2 0; 62 ds_rsub_rtn_u64 2 1 2 0; 63 ds_inc_rtn_u64 2 1 2 0; 64 ds_dec_rtn_u64 2 1 2 0;
65 ds_min_rtn_i64 2 1 2 0; 66 ds_max_rtn_i64 2 1 2 0; 67 ds_min_rtn_u64 2 1 2 0; 68 ds_max_rtn_u64 2 1 2 0;
69 ds_and_rtn_b64 2 1 2 0; 6a ds_or_rtn_b64 2 1 2 0; 6b ds_xor_rtn_b64 2 1 2 0; 6c ds_mskor_rtn_b64 2 1 2 2;
6d ds_wrxchg_rtn_b64 2 1 2 0; 6e ds_wrxchg2_rtn_b64 4 1 2 2; 6f ds_wrxchg2st64_rtn_b64 4 1 2 2;
70 ds_cmpst_rtn_b64 2 1 2 2; 71 ds_cmpst_rtn_f64 2 1 2 2; 72 ds_min_rtn_f64 2 1 2 0;
73 ds_max_rtn_f64 2 1 2 0; 76 ds_read_b64 2 1 0 0; 77 ds_read2_b64 4 1 0 0; 78 ds_read2st64_b64 4 1 0 0;
7c ds_add_rtn_f64 2 1 2 0; 9d ds_gws_barrier 0 1 0 0; b6 ds_read_addtid_b32 1 0 0 0;
b7 ds_pk_add_rtn_f16 1 1 1 0; b8 ds_pk_add_rtn_bf16 1 1 1 0; bd ds_consume 1 0 0 0; be ds_append 1 0 0 0;
de ds_write_b96 0 1 3 0; df ds_write_b128 0 1 4 0; e0 ds_read_b64_tr_b4 2 1 0 0;
e1 ds_read_b96_tr_b6 3 1 0 0; e2 ds_read_b64_tr_b8 2 1 0 0; e3 ds_read_b64_tr_b16 2 1 0 0;
fe ds_read_b96 3 1 0 0; ff ds_read_b128 4 1 0 0;
34 ds_wrap_rtn_b32 1 1 1 1; 7e ds_condxchg32_rtn_b64 2 1 2 0; 98 ds_gws_sema_release_all 0 0 0 0; 99
ds_gws_init 0 1 0 0; 9a ds_gws_sema_v 0 0 0 0; 9b ds_gws_sema_br 0 1 0 0; 9c ds_gws_sema_p 0 0 0 0
    """
)

FLAT = table(
    """
10 load_ubyte 1 0; 11 load_sbyte 1 0; 12 load_ushort 1 0; 13 load_sshort 1 0; 14 load_dword 1 0;
15 load_dwordx2 2 0; 16 load_dwordx3 3 0; 17 load_dwordx4 4 0; 18 store_byte 0 1; 19 store_byte_d16_hi 0 1;
1a store_short 0 1; 1b store_short_d16_hi 0 1; 1c store_dword 0 1; 1d store_dwordx2 0 2;
1e store_dwordx3 0 3; 1f store_dwordx4 0 4; 20 load_ubyte_d16 1 0; 21 load_ubyte_d16_hi 1 0;
22 load_sbyte_d16 1 0; 23 load_sbyte_d16_hi 1 0; 24 load_short_d16 1 0; 25 load_short_d16_hi 1 0;
26 load_lds_ubyte 0 0; 27 load_lds_sbyte 0 0; 28 load_lds_ushort 0 0; 29 load_lds_sshort 0 0;
2a load_lds_dword 0 0; 40 atomic_swap 1 1; 41 atomic_cmpswap 1 2; 42 atomic_add 1 1; 43 atomic_sub 1 1;
44 atomic_smin 1 1; 45 atomic_umin 1 1; 46 atomic_smax 1 1; 47 atomic_umax 1 1; 48 atomic_and 1 1;
49 atomic_or 1 1; 4a atomic_xor 1 1; 4b atomic_inc 1 1; 4c atomic_dec 1 1; 4d atomic_add_f32 1 1;
4e atomic_pk_add_f16 1 1; 4f atomic_add_f64 2 2; 50 atomic_min_f64 2 2; 51 atomic_max_f64 2 2;
52 atomic_pk_add_bf16 1 1; 60 atomic_swap_x2 2 2; 61 atomic_cmpswap_x2 2 4; 62 atomic_add_x2 2 2;
63 atomic_sub_x2 2 2; 64 atomic_smin_x2 2 2; 65 atomic_umin_x2 2 2; 66 atomic_smax_x2 2 2;
67 atomic_umax_x2 2 2; 68 atomic_and_x2 2 2; 69 atomic_or_x2 2 2; 6a atomic_xor_x2 2 2;
6b atomic_inc_x2 2 2; 6c atomic_dec_x2 2 2; 7d load_lds_dwordx4 0 0; 7e load_lds_dwordx3 0 0
    """
)

MUBUF = table(
    """
00 buffer_load_format_x 1 0; 01 buffer_load_format_xy 2 0; 02 buffer_load_format_xyz 3 0; 03
buffer_load_format_xyzw 4 0; 04 buffer_store_format_x 0 1; 05 buffer_store_format_xy 0 2; 06
buffer_store_format_xyz 0 3; 07 buffer_store_format_xyzw 0 4; 08 buffer_load_format_d16_x 1 0; 09
buffer_load_format_d16_xy 1 0; 0a buffer_load_format_d16_xyz 2 0; 0b buffer_load_format_d16_xyzw 2 0; 0c
buffer_store_format_d16_x 0 1; 0d buffer_store_format_d16_xy 0 1; 0e buffer_store_format_d16_xyz 0 2; 0f
buffer_store_format_d16_xyzw 0 2;
10 buffer_load_ubyte 1 0; 11 buffer_load_sbyte 1 0;
12 buffer_load_ushort 1 0; 13 buffer_load_sshort 1 0; 14 buffer_load_dword 1 0; 15 buffer_load_dwordx2 2 0;
16 buffer_load_dwordx3 3 0; 17 buffer_load_dwordx4 4 0; 18 buffer_store_byte 0 1;
19 buffer_store_byte_d16_hi 0 1; 1a buffer_store_short 0 1; 1b buffer_store_short_d16_hi 0 1;
1c buffer_store_dword 0 1; 1d buffer_store_dwordx2 0 2; 1e buffer_store_dwordx3 0 3;
1f buffer_store_dwordx4 0 4; 20 buffer_load_ubyte_d16 1 0; 21 buffer_load_ubyte_d16_hi 1 0;
22 buffer_load_sbyte_d16 1 0; 23 buffer_load_sbyte_d16_hi 1 0; 24 buffer_load_short_d16 1 0;
25 buffer_load_short_d16_hi 1 0; 28 buffer_wbl2 0 0; 29 buffer_inv 0 0; 40 buffer_atomic_swap 1 1;
41 buffer_atomic_cmpswap 1 2; 42 buffer_atomic_add 1 1; 43 buffer_atomic_sub 1 1; 44 buffer_atomic_smin 1 1;
45 buffer_atomic_umin 1 1; 46 buffer_atomic_smax 1 1; 47 buffer_atomic_umax 1 1; 48 buffer_atomic_and 1 1;
49 buffer_atomic_or 1 1; 4a buffer_atomic_xor 1 1; 4b buffer_atomic_inc 1 1; 4c buffer_atomic_dec 1 1;
4d buffer_atomic_add_f32 1 1; 4e buffer_atomic_pk_add_f16 1 1; 4f buffer_atomic_add_f64 2 2;
50 buffer_atomic_min_f64 2 2; 51 buffer_atomic_max_f64 2 2; 52 buffer_atomic_pk_add_bf16 1 1;
60 buffer_atomic_swap_x2 2 2; 61 buffer_atomic_cmpswap_x2 2 4; 62 buffer_atomic_add_x2 2 2;
63 buffer_atomic_sub_x2 2 2; 64 buffer_atomic_smin_x2 2 2; 65 buffer_atomic_umin_x2 2 2;
66 buffer_atomic_smax_x2 2 2; 67 buffer_atomic_umax_x2 2 2; 68 buffer_atomic_and_x2 2 2;
69 buffer_atomic_or_x2 2 2; 6a buffer_atomic_xor_x2 2 2; 6b buffer_atomic_inc_x2 2 2;
6c buffer_atomic_dec_x2 2 2;
26 buffer_load_format_d16_hi_x 1 0; 27 buffer_store_format_d16_hi_x 0 1
    """
)

MTBUF = table(
    """
00 tbuffer_load_format_x 1 0; 01 tbuffer_load_format_xy 2 0; 02 tbuffer_load_format_xyz 3 0; 03
tbuffer_load_format_xyzw 4 0; 04 tbuffer_store_format_x 0 1; 05 tbuffer_store_format_xy 0 2; 06
tbuffer_store_format_xyz 0 3; 07 tbuffer_store_format_xyzw 0 4; 08 tbuffer_load_format_d16_x 1 0; 09
tbuffer_load_format_d16_xy 1 0; 0a tbuffer_load_format_d16_xyz 2 0; 0b tbuffer_load_format_d16_xyzw 2 0; 0c
tbuffer_store_format_d16_x 0 1; 0d tbuffer_store_format_d16_xy 0 1; 0e tbuffer_store_format_d16_xyz 0 2; 0f
tbuffer_store_format_d16_xyzw 0 2
    """
)
