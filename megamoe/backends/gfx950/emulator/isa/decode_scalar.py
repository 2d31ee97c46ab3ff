"""Decoders of SOP1, SOP2, SOPC, SOPK, SOPP and SMEM."""

from __future__ import annotations

from megamoe.backends.gfx950.emulator.isa.fields import Words, row_of, source_of
from megamoe.backends.gfx950.emulator.isa.instruction import Instruction, Kind, Operand
from megamoe.backends.gfx950.emulator.isa.operands import LITERAL, scalar
from megamoe.backends.gfx950.emulator.isa.scalar import SMEM, SOP1, SOP2, SOPC, SOPK, SOPP


def sop2(offset: int, w: Words) -> Instruction:
    row = row_of(SOP2, w[0] >> 23 & 0x7F, "SOP2", offset)
    codes = (w[0] & 0xFF, w[0] >> 8 & 0xFF)
    long = LITERAL in codes
    srcs = [source_of(c, n, row.mnemonic, w[1]) for c, n in zip(codes, row.widths[1:])]
    return Instruction(
        offset, 8 if long else 4, "SOP2", row.mnemonic, scalar(w[0] >> 16 & 0x7F, row.widths[0]), srcs=srcs
    )


def sop1(offset: int, w: Words) -> Instruction:
    row = row_of(SOP1, w[0] >> 8 & 0xFF, "SOP1", offset)
    code = w[0] & 0xFF
    dst = scalar(w[0] >> 16 & 0x7F, row.widths[0]) if row.widths[0] else Operand()
    srcs = [source_of(code, row.widths[1], row.mnemonic, w[1])] if row.widths[1] else []
    return Instruction(offset, 8 if code == LITERAL else 4, "SOP1", row.mnemonic, dst, srcs=srcs)


def sopc(offset: int, w: Words) -> Instruction:
    row = row_of(SOPC, w[0] >> 16 & 0x7F, "SOPC", offset)
    codes = (w[0] & 0xFF, w[0] >> 8 & 0xFF)
    srcs = [source_of(c, n, row.mnemonic, w[1]) for c, n in zip(codes, row.widths[1:])]
    if row.mnemonic == "s_set_gpr_idx_on":  # its second field is four bits, one an operand position
        return Instruction(offset, 4, "SOPC", row.mnemonic, srcs=srcs, mods={"simm": codes[1] & 15})
    return Instruction(offset, 8 if LITERAL in codes else 4, "SOPC", row.mnemonic, srcs=srcs)


def sopk(offset: int, w: Words) -> Instruction:
    row = row_of(SOPK, w[0] >> 23 & 0x1F, "SOPK", offset)
    reg, name = scalar(w[0] >> 16 & 0x7F, max(row.widths[0], 1)), row.mnemonic
    out = Instruction(offset, 4, "SOPK", name, mods={"simm": w[0] & 0xFFFF})
    if row.widths[0]:
        out.dst = reg
    if name in ("s_addk_i32", "s_mulk_i32", "s_cmovk_i32", "s_setreg_b32") or name.startswith("s_cmpk"):
        out.srcs = [reg]
    if name == "s_setreg_imm32_b32":
        out.size, out.srcs = 8, [Operand(Kind.CONST, 0, 1, w[1], literal=True, code=LITERAL)]
    return out


def sopp(offset: int, w: Words) -> Instruction:
    row = row_of(SOPP, w[0] >> 16 & 0x7F, "SOPP", offset)
    return Instruction(offset, 4, "SOPP", row.mnemonic, mods={"simm": w[0] & 0xFFFF})


def smem(offset: int, w: Words) -> Instruction:
    row = row_of(SMEM, w[0] >> 18 & 0xFF, "SMEM", offset)
    out = Instruction(offset, 8, "SMEM", row.mnemonic)
    width = row.widths[0]
    if not width:
        return out
    out.dst = scalar(w[0] >> 6 & 0x7F, width)
    if "time" in row.mnemonic:
        return out
    imm, soffset_en = w[0] >> 17 & 1, w[0] >> 14 & 1
    out.srcs = [scalar((w[0] & 0x3F) * 2, 4 if "buffer" in row.mnemonic else 2)]
    if soffset_en or not imm:
        out.srcs.append(scalar(w[1] >> 25 if soffset_en else w[1] & 0x7F, 1))
    if imm:
        out.mods["offset"] = (w[1] & 0x1FFFFF) - (w[1] & 0x100000) * 2
    return out
