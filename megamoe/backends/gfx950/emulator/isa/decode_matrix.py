"""Decoder of VOP3P: packed arithmetic and the matrix instructions."""

from __future__ import annotations

from megamoe.backends.gfx950.emulator.errors import DecodeError
from megamoe.backends.gfx950.emulator.isa.fields import Words, row_of, source_of
from megamoe.backends.gfx950.emulator.isa.instruction import Instruction
from megamoe.backends.gfx950.emulator.isa.matrix import VOP3P
from megamoe.backends.gfx950.emulator.isa.operands import source, vector

_F8F6F4_WIDTH = (8, 8, 6, 6, 4)
_SCALE_PREFIX = 0x2C


def vop3p(offset: int, w: Words) -> Instruction:
    opcode = w[0] >> 16 & 0x7F
    if opcode == _SCALE_PREFIX:
        return _scaled_mfma(offset, w)
    if opcode in (0x58, 0x59):
        read = opcode == 0x58
        out = Instruction(offset, 8, "VOP3P", "v_accvgpr_read_b32" if read else "v_accvgpr_write_b32")
        out.dst = vector(w[0] & 0xFF, 1, not read)
        out.srcs = [source_of(w[1] & 0x1FF, 1, out.mnemonic, None, acc=read)]
        return out
    row = row_of(VOP3P, opcode, "VOP3P", offset)
    codes = (w[1] & 0x1FF, w[1] >> 9 & 0x1FF, w[1] >> 18 & 0x1FF)
    out = Instruction(offset, 8, "VOP3P", row.mnemonic)
    if row.mnemonic.startswith(("v_mfma", "v_smfmac")):
        cd, acc = bool(w[0] >> 15 & 1), w[1] >> 27 & 3
        widths = list(row.widths)
        out.mods.update(cbsz=w[0] >> 8 & 7, abid=w[0] >> 11 & 15, blgp=w[1] >> 29 & 7)
        if row.mnemonic.endswith("f8f6f4"):
            for k, name in ((1, "cbsz"), (2, "blgp")):
                if out.mods[name] >= len(_F8F6F4_WIDTH):
                    raise DecodeError(f"{name} at byte {offset:#x} must be 0 to 4, got {out.mods[name]}")
                widths[k] = _F8F6F4_WIDTH[out.mods[name]]
        out.dst = vector(w[0] & 0xFF, widths[0], cd)
        sparse = row.mnemonic.startswith(
            "v_smfmac"
        )  # its third source is the index, its result also the addend
        flags = (bool(acc & 1), bool(acc & 2), cd and not sparse)
        kind = "d" if row.mnemonic.endswith("f64") else "f"
        out.srcs = [source(c, n, kind, None, acc=a) for c, n, a in zip(codes, widths[1:], flags)]
        return out
    out.dst = vector(w[0] & 0xFF, row.widths[0])
    out.mods.update(
        neg=w[1] >> 29 & 7, neg_hi=w[0] >> 8 & 7, opsel=w[0] >> 11 & 7, clamp=w[0] >> 15 & 1,
        opsel_hi=(w[1] >> 27 & 3) | (w[0] >> 14 & 1) << 2,
    )  # fmt: skip
    out.srcs = [source_of(c, n, row.mnemonic, None) for c, n in zip(codes, row.widths[1:])]
    return out


def _scaled_mfma(offset: int, w: Words) -> Instruction:
    """Two encodings in a row: the scales with their byte selects, then the matrix instruction."""
    out = vop3p(offset + 8, w[2:])
    if not out.mnemonic.endswith("f8f6f4"):
        raise DecodeError(f"a scale prefix at byte {offset:#x} must stand before f8f6f4, got {out.mnemonic}")
    out.offset, out.size = offset, 16
    out.mnemonic = out.mnemonic.replace("v_mfma_", "v_mfma_scale_")
    out.mods.pop("abid")  # its lowest bit only says that a prefix stands before
    out.mods.update(opsel=w[0] >> 11 & 3, opsel_hi=w[1] >> 27 & 3)
    out.srcs += [source(w[1] & 0x1FF, 1, "f", None), source(w[1] >> 9 & 0x1FF, 1, "f", None)]
    return out
