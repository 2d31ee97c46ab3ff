"""Decoders of VOP1, VOP2, VOPC and VOP3."""

from __future__ import annotations

from megamoe.backends.gfx950.emulator.isa.fields import Words, row_of, source_of
from megamoe.backends.gfx950.emulator.isa.instruction import VCC, Instruction, Kind, Operand
from megamoe.backends.gfx950.emulator.isa.operands import DPP, LITERAL, SDWA, scalar, vector
from megamoe.backends.gfx950.emulator.isa.table import Row
from megamoe.backends.gfx950.emulator.isa.vector import VOP1, VOP2, VOP3, VOPC

_CARRY_OUT = (
    "v_add_co_u32",
    "v_sub_co_u32",
    "v_subrev_co_u32",
    "v_addc_co_u32",
    "v_subb_co_u32",
    "v_subbrev_co_u32",
)
_CARRY_IN = ("v_addc_co_u32", "v_subb_co_u32", "v_subbrev_co_u32", "v_cndmask_b32")


def _short_vector(offset: int, w: Words, encoding: str, row: Row, sources: list[int]) -> Instruction:
    """VOP1, VOP2 and VOPC share the way the first source selects a literal, DPP or SDWA."""
    name, long = row.mnemonic, sources[0] if sources else 0
    out = Instruction(offset, 4, encoding, name)
    if long in (DPP, SDWA):
        out.size = 8
        word = w[1]
        if long == DPP:
            out.mods.update(
                dpp=word >> 8 & 0x1FF, bank_mask=word >> 24 & 15, row_mask=word >> 28 & 15, has_dpp=1
            )
            out.mods.update(bound_ctrl=word >> 19 & 1)
            out.mods.update(
                neg=(word >> 20 & 1) | (word >> 22 & 1) << 1, abs=(word >> 21 & 1) | (word >> 23 & 1) << 1
            )
            sources[0] = 256 + (word & 0xFF)
        else:
            out.mods.update(has_sdwa=1, src0_sel=word >> 16 & 7, src1_sel=word >> 24 & 7)
            out.mods.update(src0_sext=word >> 19 & 1, src1_sext=word >> 27 & 1)
            out.mods.update(
                neg=(word >> 20 & 1) | (word >> 28 & 1) << 1, abs=(word >> 21 & 1) | (word >> 29 & 1) << 1
            )
            if encoding == "VOPC":
                out.sdst = scalar(word >> 8 & 0x7F if word >> 15 & 1 else VCC, 2)
            else:
                out.mods.update(
                    dst_sel=word >> 8 & 7,
                    dst_unused=word >> 11 & 3,
                    clamp=word >> 13 & 1,
                    omod=word >> 14 & 3,
                )
            sources[0] = (word & 0xFF) + (0 if word >> 23 & 1 else 256)
            if len(sources) > 1 and word >> 31 & 1:
                sources[1] -= 256
    elif LITERAL in sources:
        out.size = 8
    out.srcs = [source_of(c, n, name, w[1]) for c, n in zip(sources, row.widths[1:])]
    return out


def vop1(offset: int, w: Words) -> Instruction:
    row = row_of(VOP1, w[0] >> 9 & 0xFF, "VOP1", offset)
    has_source = len(row.widths) > 1 and row.widths[1]
    out = _short_vector(offset, w, "VOP1", row, [w[0] & 0x1FF] if has_source else [])
    code = w[0] >> 17 & 0xFF
    if row.widths[0]:
        out.dst = scalar(code, 1) if row.scalar[0] else vector(code, row.widths[0])
    if row.mnemonic == "v_accvgpr_mov_b32":
        out.dst, out.srcs = vector(code, 1, True), [vector((w[0] & 0x1FF) - 256, 1, True)]
    return out


def vop2(offset: int, w: Words) -> Instruction:
    row = row_of(VOP2, w[0] >> 25 & 0x3F, "VOP2", offset)
    name = row.mnemonic
    out = _short_vector(offset, w, "VOP2", row, [w[0] & 0x1FF, (w[0] >> 9 & 0xFF) + 256])
    out.dst = vector(w[0] >> 17 & 0xFF, row.widths[0])
    if name.startswith(("v_fmamk", "v_fmaak", "v_madmk", "v_madak")):
        constant = Operand(Kind.CONST, 0, 1, w[1], literal=True, code=LITERAL)
        out.size, out.mods["k_literal"] = 8, 1
        out.srcs = [out.srcs[0], constant, out.srcs[1]] if "mk" in name else [*out.srcs, constant]
    if name in _CARRY_OUT:
        out.sdst = scalar(VCC, 2)
    if name in _CARRY_IN:
        out.srcs.append(scalar(VCC, 2))
    return out


def vopc(offset: int, w: Words) -> Instruction:
    row = row_of(VOPC, w[0] >> 17 & 0xFF, "VOPC", offset)
    out = _short_vector(offset, w, "VOPC", row, [w[0] & 0x1FF, (w[0] >> 9 & 0xFF) + 256])
    if out.sdst.kind is Kind.NONE:
        out.sdst = scalar(VCC, 2)
    return out


def vop3(offset: int, w: Words) -> Instruction:
    opcode = w[0] >> 16 & 0x3FF
    codes = (w[1] & 0x1FF, w[1] >> 9 & 0x1FF, w[1] >> 18 & 0x1FF)
    if opcode < 0x100:
        row = row_of(VOPC, opcode, "VOP3", offset)
    elif opcode < 0x140:
        row = row_of(VOP2, opcode - 0x100, "VOP3", offset)
    elif opcode < 0x1C0:
        row = row_of(VOP1, opcode - 0x140, "VOP3", offset)
    else:
        row = row_of(VOP3, opcode, "VOP3", offset)
    name = row.mnemonic
    out = Instruction(offset, 8, "VOP3", name)
    second = opcode >= 0x1C0 and len(row.widths) > 1 and row.scalar[1] and name != "v_writelane_b32"
    carry = name in _CARRY_OUT
    out.mods.update(clamp=w[0] >> 15 & 1, omod=w[1] >> 27 & 3, neg=w[1] >> 29 & 7)
    if second or carry:
        out.sdst = scalar(w[0] >> 8 & 0x7F, 2)
    else:
        out.mods.update(abs=w[0] >> 8 & 7, opsel=w[0] >> 11 & 15)
    if "bitop3" in name:
        bits = out.mods["omod"] << 6 | out.mods["abs"] << 3 | out.mods["neg"]
        out.mods.update(bitop3=bits, omod=0, abs=0, neg=0)
    code = w[0] & 0xFF
    if opcode < 0x100:
        out.sdst = scalar(code, 2)
    elif row.widths and row.widths[0]:
        out.dst = scalar(code, row.widths[0]) if row.scalar[0] else vector(code, row.widths[0])
    widths = [n for n in row.widths[2 if second else 1 :] if n]
    out.srcs = [source_of(c, n, name, None) for c, n in zip(codes, widths)]
    if name in _CARRY_IN:
        out.srcs.append(scalar(codes[2], 2))
    return out
