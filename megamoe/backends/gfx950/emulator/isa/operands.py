"""Operand codes of the ISA: the nine-bit source field, scalar registers, inline constants."""

from __future__ import annotations

import struct

from megamoe.backends.gfx950.emulator.errors import DecodeError
from megamoe.backends.gfx950.emulator.isa.instruction import ACC_BASE, Kind, Operand

LITERAL, DPP, SDWA = 255, 250, 249
_FLOATS = {
    240: 0.5,
    241: -0.5,
    242: 1.0,
    243: -1.0,
    244: 2.0,
    245: -2.0,
    246: 4.0,
    247: -4.0,
    248: 0.15915494309189532,
}
_SPECIAL = {235, 236, 237, 238, 239, 251, 252, 253}


def value_type(mnemonic: str) -> str:
    """Type letter of the constants of an instruction: d (f64), h (f16), i (64-bit integer) or f (32-bit word)."""
    name = mnemonic.removesuffix("_e64")
    if name.startswith(("v_cvt_scalef32", "v_mfma", "v_pk_", "v_cvt_pk", "v_cvt_sr")):
        return "h" if name.endswith("_f16") and name.startswith("v_pk_") else "f"
    source = name.rsplit("_", 1)[-1]
    if name.startswith(("v_cvt_f16_f32", "v_fma_mix", "v_dot2_f32")):
        return "f"
    return {"f64": "d", "f16": "h", "b64": "i", "i64": "i", "u64": "i"}.get(source, "f")


def _inline(code: int, kind: str) -> int:
    if 128 <= code <= 192:
        return code - 128
    if 193 <= code <= 208:
        return (192 - code) & 0xFFFFFFFFFFFFFFFF
    number = _FLOATS[code]
    if kind == "d":
        return int(struct.unpack("<Q", struct.pack("<d", number))[0])
    if kind == "h":
        return int(struct.unpack("<H", struct.pack("<e", number))[0])
    return int(struct.unpack("<I", struct.pack("<f", number))[0])


def scalar(code: int, width: int) -> Operand:
    """An operand of a scalar register field (0-127)."""
    return Operand(Kind.SGPR, code, width, code=code)


def vector(code: int, width: int, acc: bool = False) -> Operand:
    """An operand of an eight-bit vector register field."""
    return Operand(Kind.VGPR, code + (ACC_BASE if acc else 0), width, code=code)


def source(code: int, width: int, kind: str, literal: int | None, *, acc: bool = False) -> Operand:
    """An operand of a source field. Raises DecodeError for a reserved code or a missing literal."""
    if code >= 256:
        return vector(code - 256, width, acc)
    if code < 128:
        return scalar(code, width)
    if code in _FLOATS or code <= 208:
        return Operand(Kind.CONST, 0, width, _inline(code, kind), code=code)
    if code == LITERAL:
        if literal is None:
            raise DecodeError("a literal constant must follow its instruction, got the end of the encoding")
        value = literal << 32 if kind == "d" else literal
        if kind == "i" and literal >> 31:
            value = literal | 0xFFFFFFFF00000000
        return Operand(Kind.CONST, 0, width, value, literal=True, code=code)
    if code in _SPECIAL:
        return Operand(Kind.SPECIAL, code, width, code=code)
    raise DecodeError(f"source code must be a register or a constant, got {code}")
