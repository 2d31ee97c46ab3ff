"""Decode gfx950 machine code, one table per encoding.

Machine code is read rather than assembly text, because the code object is what ships: what is tested is then bit for
bit what runs, and kernels of any compiler can be read without its text dump. The field positions follow the public
CDNA3 and CDNA4 ISA documents.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from megamoe.backends.gfx950.emulator.errors import DecodeError
from megamoe.backends.gfx950.emulator.isa.instruction import EXEC, SCC, VCC, Instruction, Kind, Operand
from megamoe.backends.gfx950.emulator.isa.matrix import VOP3P
from megamoe.backends.gfx950.emulator.isa.memory import DS, FLAT, MUBUF
from megamoe.backends.gfx950.emulator.isa.operands import (
    DPP,
    LITERAL,
    SDWA,
    scalar,
    source,
    value_type,
    vector,
)
from megamoe.backends.gfx950.emulator.isa.scalar import SMEM, SOP1, SOP2, SOPC, SOPK, SOPP
from megamoe.backends.gfx950.emulator.isa.table import Row
from megamoe.backends.gfx950.emulator.isa.vector import VOP1, VOP2, VOP3, VOPC

Words = tuple[int, ...]
_CARRY_OUT = (
    "v_add_co_u32",
    "v_sub_co_u32",
    "v_subrev_co_u32",
    "v_addc_co_u32",
    "v_subb_co_u32",
    "v_subbrev_co_u32",
)
_CARRY_IN = ("v_addc_co_u32", "v_subb_co_u32", "v_subbrev_co_u32", "v_cndmask_b32")
_F8F6F4_WIDTH = (8, 8, 6, 6, 4)
_SCALE_PREFIX = 0x2C


def _row(rows: dict[int, Row], opcode: int, encoding: str, offset: int) -> Row:
    if opcode not in rows:
        raise DecodeError(f"{encoding} opcode at byte {offset:#x} must be one of gfx950's, got {opcode:#x}")
    return rows[opcode]


def _src(code: int, width: int, name: str, literal: int | None, acc: bool = False) -> Operand:
    return source(code, width, value_type(name), literal, acc=acc)


def _sop2(offset: int, w: Words) -> Instruction:
    row = _row(SOP2, w[0] >> 23 & 0x7F, "SOP2", offset)
    codes = (w[0] & 0xFF, w[0] >> 8 & 0xFF)
    long = LITERAL in codes
    srcs = [_src(c, n, row.mnemonic, w[1]) for c, n in zip(codes, row.widths[1:])]
    return Instruction(
        offset, 8 if long else 4, "SOP2", row.mnemonic, scalar(w[0] >> 16 & 0x7F, row.widths[0]), srcs=srcs
    )


def _sop1(offset: int, w: Words) -> Instruction:
    row = _row(SOP1, w[0] >> 8 & 0xFF, "SOP1", offset)
    code = w[0] & 0xFF
    dst = scalar(w[0] >> 16 & 0x7F, row.widths[0]) if row.widths[0] else Operand()
    srcs = [_src(code, row.widths[1], row.mnemonic, w[1])] if row.widths[1] else []
    return Instruction(offset, 8 if code == LITERAL else 4, "SOP1", row.mnemonic, dst, srcs=srcs)


def _sopc(offset: int, w: Words) -> Instruction:
    row = _row(SOPC, w[0] >> 16 & 0x7F, "SOPC", offset)
    codes = (w[0] & 0xFF, w[0] >> 8 & 0xFF)
    srcs = [_src(c, n, row.mnemonic, w[1]) for c, n in zip(codes, row.widths[1:])]
    return Instruction(offset, 8 if LITERAL in codes else 4, "SOPC", row.mnemonic, srcs=srcs)


def _sopk(offset: int, w: Words) -> Instruction:
    row = _row(SOPK, w[0] >> 23 & 0x1F, "SOPK", offset)
    reg, name = scalar(w[0] >> 16 & 0x7F, max(row.widths[0], 1)), row.mnemonic
    out = Instruction(offset, 4, "SOPK", name, mods={"simm": w[0] & 0xFFFF})
    if row.widths[0]:
        out.dst = reg
    if name in ("s_addk_i32", "s_mulk_i32", "s_cmovk_i32", "s_setreg_b32") or name.startswith("s_cmpk"):
        out.srcs = [reg]
    if name == "s_setreg_imm32_b32":
        out.size, out.srcs = 8, [Operand(Kind.CONST, 0, 1, w[1], literal=True, code=LITERAL)]
    return out


def _sopp(offset: int, w: Words) -> Instruction:
    row = _row(SOPP, w[0] >> 16 & 0x7F, "SOPP", offset)
    return Instruction(offset, 4, "SOPP", row.mnemonic, mods={"simm": w[0] & 0xFFFF})


def _smem(offset: int, w: Words) -> Instruction:
    row = _row(SMEM, w[0] >> 18 & 0xFF, "SMEM", offset)
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
    out.srcs = [_src(c, n, name, w[1]) for c, n in zip(sources, row.widths[1:])]
    return out


def _vop1(offset: int, w: Words) -> Instruction:
    row = _row(VOP1, w[0] >> 9 & 0xFF, "VOP1", offset)
    has_source = len(row.widths) > 1 and row.widths[1]
    out = _short_vector(offset, w, "VOP1", row, [w[0] & 0x1FF] if has_source else [])
    code = w[0] >> 17 & 0xFF
    if row.widths[0]:
        out.dst = scalar(code, 1) if row.scalar[0] else vector(code, row.widths[0])
    if row.mnemonic == "v_accvgpr_mov_b32":
        out.dst, out.srcs = vector(code, 1, True), [vector((w[0] & 0x1FF) - 256, 1, True)]
    return out


def _vop2(offset: int, w: Words) -> Instruction:
    row = _row(VOP2, w[0] >> 25 & 0x3F, "VOP2", offset)
    name = row.mnemonic
    out = _short_vector(offset, w, "VOP2", row, [w[0] & 0x1FF, (w[0] >> 9 & 0xFF) + 256])
    out.dst = vector(w[0] >> 17 & 0xFF, row.widths[0])
    if name.startswith(("v_fmamk", "v_fmaak")):
        constant = Operand(Kind.CONST, 0, 1, w[1], literal=True, code=LITERAL)
        out.size, out.mods["k_literal"] = 8, 1
        out.srcs = [out.srcs[0], constant, out.srcs[1]] if "mk" in name else [*out.srcs, constant]
    if name in _CARRY_OUT:
        out.sdst = scalar(VCC, 2)
    if name in _CARRY_IN:
        out.srcs.append(scalar(VCC, 2))
    return out


def _vopc(offset: int, w: Words) -> Instruction:
    row = _row(VOPC, w[0] >> 17 & 0xFF, "VOPC", offset)
    out = _short_vector(offset, w, "VOPC", row, [w[0] & 0x1FF, (w[0] >> 9 & 0xFF) + 256])
    if out.sdst.kind is Kind.NONE:
        out.sdst = scalar(VCC, 2)
    return out


def _vop3(offset: int, w: Words) -> Instruction:
    opcode = w[0] >> 16 & 0x3FF
    codes = (w[1] & 0x1FF, w[1] >> 9 & 0x1FF, w[1] >> 18 & 0x1FF)
    if opcode < 0x100:
        row = _row(VOPC, opcode, "VOP3", offset)
    elif opcode < 0x140:
        row = _row(VOP2, opcode - 0x100, "VOP3", offset)
    elif opcode < 0x1C0:
        row = _row(VOP1, opcode - 0x140, "VOP3", offset)
    else:
        row = _row(VOP3, opcode, "VOP3", offset)
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
    out.srcs = [_src(c, n, name, None) for c, n in zip(codes, widths)]
    if name in _CARRY_IN:
        out.srcs.append(scalar(codes[2], 2))
    return out


def _vop3p(offset: int, w: Words) -> Instruction:
    opcode = w[0] >> 16 & 0x7F
    if opcode == _SCALE_PREFIX:
        return _scaled_mfma(offset, w)
    if opcode in (0x58, 0x59):
        read = opcode == 0x58
        out = Instruction(offset, 8, "VOP3P", "v_accvgpr_read_b32" if read else "v_accvgpr_write_b32")
        out.dst = vector(w[0] & 0xFF, 1, not read)
        out.srcs = [_src(w[1] & 0x1FF, 1, out.mnemonic, None, acc=read)]
        return out
    row = _row(VOP3P, opcode, "VOP3P", offset)
    codes = (w[1] & 0x1FF, w[1] >> 9 & 0x1FF, w[1] >> 18 & 0x1FF)
    out = Instruction(offset, 8, "VOP3P", row.mnemonic)
    if row.mnemonic.startswith("v_mfma"):
        cd, acc = bool(w[0] >> 15 & 1), w[1] >> 27 & 3
        widths = list(row.widths)
        out.mods.update(cbsz=w[0] >> 8 & 7, abid=w[0] >> 11 & 15, blgp=w[1] >> 29 & 7)
        if row.mnemonic.endswith("f8f6f4"):
            for k, name in ((1, "cbsz"), (2, "blgp")):
                if out.mods[name] >= len(_F8F6F4_WIDTH):
                    raise DecodeError(f"{name} at byte {offset:#x} must be 0 to 4, got {out.mods[name]}")
                widths[k] = _F8F6F4_WIDTH[out.mods[name]]
        out.dst = vector(w[0] & 0xFF, widths[0], cd)
        flags = (bool(acc & 1), bool(acc & 2), cd)
        kind = "d" if row.mnemonic.endswith("f64") else "f"
        out.srcs = [source(c, n, kind, None, acc=a) for c, n, a in zip(codes, widths[1:], flags)]
        return out
    out.dst = vector(w[0] & 0xFF, row.widths[0])
    out.mods.update(
        neg=w[1] >> 29 & 7, neg_hi=w[0] >> 8 & 7, opsel=w[0] >> 11 & 7, clamp=w[0] >> 15 & 1,
        opsel_hi=(w[1] >> 27 & 3) | (w[0] >> 14 & 1) << 2,
    )  # fmt: skip
    out.srcs = [_src(c, n, row.mnemonic, None) for c, n in zip(codes, row.widths[1:])]
    return out


def _scaled_mfma(offset: int, w: Words) -> Instruction:
    """Two encodings in a row: the scales with their byte selects, then the matrix instruction."""
    out = _vop3p(offset + 8, w[2:])
    if not out.mnemonic.endswith("f8f6f4"):
        raise DecodeError(f"a scale prefix at byte {offset:#x} must stand before f8f6f4, got {out.mnemonic}")
    out.offset, out.size = offset, 16
    out.mnemonic = out.mnemonic.replace("v_mfma_", "v_mfma_scale_")
    out.mods.pop("abid")  # its lowest bit only says that a prefix stands before
    out.mods.update(opsel=w[0] >> 11 & 3, opsel_hi=w[1] >> 27 & 3)
    out.srcs += [source(w[1] & 0x1FF, 1, "f", None), source(w[1] >> 9 & 0x1FF, 1, "f", None)]
    return out


def _ds(offset: int, w: Words) -> Instruction:
    row = _row(DS, w[0] >> 17 & 0xFF, "DS", offset)
    acc = bool(w[0] >> 25 & 1)
    out = Instruction(offset, 8, "DS", row.mnemonic)
    dst, addr, data0, data1 = row.widths
    if dst:
        out.dst = vector(w[1] >> 24 & 0xFF, dst, acc)
    if addr:
        out.srcs.append(vector(w[1] & 0xFF, addr))
    if data0:
        out.srcs.append(vector(w[1] >> 8 & 0xFF, data0, acc))
    if data1:
        out.srcs.append(vector(w[1] >> 16 & 0xFF, data1, acc))
    low, high = w[0] & 0xFF, w[0] >> 8 & 0xFF
    if "read2" in row.mnemonic or "write2" in row.mnemonic or "wrxchg2" in row.mnemonic:
        out.mods.update(offset=low, offset1=high)
    else:
        out.mods.update(offset=low | high << 8)
    if w[0] >> 16 & 1:
        out.mods["gds"] = 1
    return out


def _flat(offset: int, w: Words) -> Instruction:
    row = _row(FLAT, w[0] >> 18 & 0x7F, "FLAT", offset)
    segment = w[0] >> 14 & 3
    if segment == 3:
        raise DecodeError(f"FLAT segment at byte {offset:#x} must be 0 to 2, got 3")
    name = ("flat", "scratch", "global")[segment] + "_" + row.mnemonic
    acc, saddr = bool(w[1] >> 23 & 1), w[1] >> 16 & 0x7F
    out = Instruction(offset, 8, "FLAT", name)
    imm = w[0] & 0x1FFF
    out.mods.update(
        offset=imm - 0x2000 if imm & 0x1000 and segment else imm,
        sc0=w[0] >> 16 & 1,
        nt=w[0] >> 17 & 1,
        sc1=w[0] >> 25 & 1,
    )
    width, data = row.widths
    if width and not ("atomic" in name and not out.mods["sc0"]):
        out.dst = vector(w[1] >> 24 & 0xFF, width, acc)
    if segment == 1:
        used = w[0] >> 13 & 1
        out.srcs.append(vector(w[1] & 0xFF, 1) if used else Operand())
    else:
        out.srcs.append(vector(w[1] & 0xFF, 1 if segment == 2 and saddr != 0x7F else 2))
    if data:
        out.srcs.append(vector(w[1] >> 8 & 0xFF, data, acc))
    out.mods["data"] = 1 if data else 0
    out.srcs.append(scalar(saddr, 1 if segment == 1 else 2) if segment and saddr != 0x7F else Operand())
    return out


def _mubuf(offset: int, w: Words) -> Instruction:
    row = _row(MUBUF, w[0] >> 18 & 0x7F, "MUBUF", offset)
    name, acc = row.mnemonic, bool(w[1] >> 23 & 1)
    out = Instruction(offset, 8, "MUBUF", name)
    bits = {"offen": 12, "idxen": 13, "sc0": 14, "sc1": 15, "lds": 16, "nt": 17}
    out.mods.update({key: w[0] >> at & 1 for key, at in bits.items()}, offset=w[0] & 0xFFF)
    if name in ("buffer_wbl2", "buffer_inv"):
        return out
    result, data = row.widths
    code = w[1] >> 8 & 0xFF
    if result and not out.mods["lds"] and not ("atomic" in name and not out.mods["sc0"]):
        out.dst = vector(code, result, acc)
    both = out.mods["offen"] and out.mods["idxen"]
    used = out.mods["offen"] or out.mods["idxen"]
    out.srcs = [
        vector(w[1] & 0xFF, 2 if both else 1) if used else Operand(),
        scalar((w[1] >> 16 & 0x1F) * 4, 4),
    ]
    out.srcs.append(_src(w[1] >> 24, 1, name, None))
    out.srcs.append(vector(code, data, acc) if data else Operand())
    return out


def _choose(word: int) -> Callable[[int, Words], Instruction] | None:
    top = word >> 23
    if not word >> 31:
        return {0x3F: _vop1, 0x3E: _vopc}.get(word >> 25, _vop2)
    if top == 0x17D:
        return _sop1
    if top == 0x17E:
        return _sopc
    if top == 0x17F:
        return _sopp
    if word >> 28 == 0xB:
        return _sopk
    if word >> 30 == 2:
        return _sop2
    if top == 0x1A7:
        return _vop3p
    return {0x30: _smem, 0x34: _vop3, 0x36: _ds, 0x37: _flat, 0x38: _mubuf}.get(word >> 26)


def decode_one(code: bytes, offset: int) -> Instruction:
    """The instruction at byte `offset`. Raises DecodeError naming the offset and the word."""
    if offset % 4 or offset + 4 > len(code):
        raise DecodeError(f"offset must be a multiple of 4 inside {len(code)} bytes of code, got {offset}")
    words = struct.unpack("<4I", code[offset : offset + 16].ljust(16, b"\0"))
    chosen = _choose(words[0])
    if chosen is None:
        raise DecodeError(f"word at byte {offset:#x} must be a gfx950 instruction, got {words[0]:#010x}")
    out = chosen(offset, words)
    if offset + out.size > len(code):
        raise DecodeError(
            f"instruction {out.mnemonic} at byte {offset:#x} must end inside the code, got {len(code)}"
        )
    out.mods = {key: value for key, value in out.mods.items() if value}
    return out


def decode(code: bytes) -> list[Instruction]:
    """All instructions of a kernel's code, in order."""
    out: list[Instruction] = []
    offset = 0
    while offset < len(code):
        one = decode_one(code, offset)
        out.append(one)
        offset += one.size
    return out


__all__ = ["EXEC", "SCC", "decode", "decode_one"]
