"""Decoders of DS, FLAT, MUBUF and MTBUF."""

from __future__ import annotations

from megamoe.backends.gfx950.emulator.errors import DecodeError
from megamoe.backends.gfx950.emulator.isa.fields import Words, row_of, source_of
from megamoe.backends.gfx950.emulator.isa.instruction import Instruction, Operand
from megamoe.backends.gfx950.emulator.isa.memory import DS, FLAT, MTBUF, MUBUF
from megamoe.backends.gfx950.emulator.isa.operands import scalar, vector


def ds(offset: int, w: Words) -> Instruction:
    row = row_of(DS, w[0] >> 17 & 0xFF, "DS", offset)
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


def flat(offset: int, w: Words) -> Instruction:
    row = row_of(FLAT, w[0] >> 18 & 0x7F, "FLAT", offset)
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


def _buffer_sources(out: Instruction, w: Words, data: Operand) -> list[Operand]:
    """Address, descriptor, scalar offset, data."""
    both = out.mods["offen"] and out.mods["idxen"]
    used = out.mods["offen"] or out.mods["idxen"]
    address = vector(w[1] & 0xFF, 2 if both else 1) if used else Operand()
    offset = source_of(w[1] >> 24, 1, out.mnemonic, None)
    return [address, scalar((w[1] >> 16 & 0x1F) * 4, 4), offset, data]


def mubuf(offset: int, w: Words) -> Instruction:
    row = row_of(MUBUF, w[0] >> 18 & 0x7F, "MUBUF", offset)
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
    out.srcs = _buffer_sources(out, w, vector(code, data, acc) if data else Operand())
    return out


def mtbuf(offset: int, w: Words) -> Instruction:
    """Typed buffer accesses carry their data and number format; `simm` is data format | number format << 4."""
    row = row_of(MTBUF, w[0] >> 15 & 15, "MTBUF", offset)
    out = Instruction(offset, 8, "MTBUF", row.mnemonic)
    out.mods.update(offset=w[0] & 0xFFF, offen=w[0] >> 12 & 1, idxen=w[0] >> 13 & 1, sc0=w[0] >> 14 & 1)
    out.mods.update(sc1=w[1] >> 21 & 1, nt=w[1] >> 22 & 1, simm=w[0] >> 19 & 15 | (w[0] >> 23 & 7) << 4)
    result, data = row.widths
    code, acc = w[1] >> 8 & 0xFF, bool(w[1] >> 23 & 1)
    if result:
        out.dst = vector(code, result, acc)
    out.srcs = _buffer_sources(out, w, vector(code, data, acc) if data else Operand())
    return out
