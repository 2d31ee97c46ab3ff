"""The one line grammar of the opcode tables: `hex-opcode mnemonic width...`, rows separated by `;`.

A width is a number of dwords; a letter before it says that the operand is scalar although the encoding is a vector
one: `s` a scalar destination, `k` a scalar source or a second, scalar destination.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One opcode of one encoding: widths in dwords, `scalar[i]` where operand i is scalar."""

    mnemonic: str
    widths: tuple[int, ...]
    scalar: tuple[bool, ...]


def table(text: str) -> dict[int, Row]:
    """Read a table. Raises ValueError when an opcode is listed twice."""
    rows: dict[int, Row] = {}
    for line in text.replace("\n", " ").split(";"):
        fields = line.split()
        if not fields:
            continue
        opcode = int(fields[0], 16)
        if opcode in rows:
            raise ValueError(
                f"opcode {opcode:#x} must be listed once, got {rows[opcode].mnemonic} and {fields[1]}"
            )
        widths = tuple(int(field.lstrip("sk")) for field in fields[2:])
        rows[opcode] = Row(fields[1], widths, tuple(field[0] in "sk" for field in fields[2:]))
    return rows
