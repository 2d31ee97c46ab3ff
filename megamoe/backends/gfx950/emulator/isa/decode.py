"""Decode gfx950 machine code, one table per encoding.

Machine code is read rather than assembly text, because the code object is what ships: what is tested is then bit for
bit what runs, and kernels of any compiler can be read without its text dump. The field positions follow the public
CDNA3 and CDNA4 ISA documents.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from megamoe.backends.gfx950.emulator.errors import DecodeError
from megamoe.backends.gfx950.emulator.isa.decode_matrix import vop3p
from megamoe.backends.gfx950.emulator.isa.decode_memory import ds, flat, mtbuf, mubuf
from megamoe.backends.gfx950.emulator.isa.decode_scalar import smem, sop1, sop2, sopc, sopk, sopp
from megamoe.backends.gfx950.emulator.isa.decode_vector import vop1, vop2, vop3, vopc
from megamoe.backends.gfx950.emulator.isa.fields import Words
from megamoe.backends.gfx950.emulator.isa.instruction import Instruction


def _choose(word: int) -> Callable[[int, Words], Instruction] | None:
    top = word >> 23
    if not word >> 31:
        return {0x3F: vop1, 0x3E: vopc}.get(word >> 25, vop2)
    if top == 0x17D:
        return sop1
    if top == 0x17E:
        return sopc
    if top == 0x17F:
        return sopp
    if word >> 28 == 0xB:
        return sopk
    if word >> 30 == 2:
        return sop2
    if top == 0x1A7:
        return vop3p
    return {0x30: smem, 0x34: vop3, 0x36: ds, 0x37: flat, 0x38: mubuf, 0x3A: mtbuf}.get(word >> 26)


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
