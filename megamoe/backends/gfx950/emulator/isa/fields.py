"""What the decoders of all encodings share: looking an opcode up, reading a source field."""

from __future__ import annotations

from megamoe.backends.gfx950.emulator.errors import DecodeError
from megamoe.backends.gfx950.emulator.isa.instruction import Operand
from megamoe.backends.gfx950.emulator.isa.operands import source, value_type
from megamoe.backends.gfx950.emulator.isa.table import Row

Words = tuple[int, ...]


def row_of(rows: dict[int, Row], opcode: int, encoding: str, offset: int) -> Row:
    """The row of an opcode. Raises DecodeError naming the encoding and the number of one that gfx950 does not have."""
    if opcode not in rows:
        raise DecodeError(f"{encoding} opcode at byte {offset:#x} must be one of gfx950's, got {opcode:#x}")
    return rows[opcode]


def source_of(code: int, width: int, name: str, literal: int | None, acc: bool = False) -> Operand:
    """An operand of a source field, its constants in the instruction's type."""
    return source(code, width, value_type(name), literal, acc=acc)
