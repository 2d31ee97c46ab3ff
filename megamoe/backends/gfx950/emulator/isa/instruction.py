"""What a decoded instruction is: operands, modifiers and the registers it reads and writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum


class Kind(IntEnum):
    """Where an operand lives. VGPR indices count from 0, accumulation registers from 256 (ACC_BASE)."""

    NONE = 0
    VGPR = 1
    SGPR = 2
    CONST = 3
    SPECIAL = 4


_BRANCHES = {"s_branch", *(f"s_cbranch_{on}" for on in ("scc0", "scc1", "vccz", "vccnz", "execz", "execnz"))}
ACC_BASE = 256
VCC, M0, EXEC, SCC = 106, 124, 126, 253


@dataclass(slots=True)
class Operand:
    """`idx` is a register or, for SPECIAL, the source code (235 shared_base ... 253 scc). `width` in dwords.

    `value` is a constant as the instruction sees it: 64 bits, sign-extended or in double format where the type asks.
    """

    kind: Kind = Kind.NONE
    idx: int = 0
    width: int = 1
    value: int = 0
    literal: bool = False
    code: int = 0


@dataclass(slots=True)
class Instruction:
    """One machine instruction. `offset` is in bytes from the start of the code; `size` 4, 8, 12 or 16 bytes.

    `srcs` are in assembly order without the destination. `mods` holds the non-zero modifier fields by name
    (offset, sc0, sc1, nt, lds, offen, idxen, neg, abs, opsel, opsel_hi, neg_hi, clamp, omod, dpp, sdwa, cbsz, ...).
    """

    offset: int
    size: int
    encoding: str
    mnemonic: str
    dst: Operand = field(default_factory=Operand)
    sdst: Operand = field(default_factory=Operand)
    srcs: list[Operand] = field(default_factory=list)
    mods: dict[str, int] = field(default_factory=dict)
    line: int = 0

    @property
    def is_branch(self) -> bool:
        """Whether `mods['simm']` is a distance in dwords from the next instruction."""
        return self.mnemonic in _BRANCHES

    @property
    def target(self) -> int:
        """Byte offset that a taken branch goes to."""
        simm = self.mods.get("simm", 0)
        return self.offset + self.size + 4 * (simm - 0x10000 if simm & 0x8000 else simm)
