"""PTX text that turns packed words (packing.py) into e4m3 operands of an FP8 step: plain strings, as fragments.py's."""

from __future__ import annotations

_OR_AND = "0xF8"
"""lop3: a | (b & c)."""


def decode(word: str, rows: tuple[str, str], tables: tuple[str, str, str, str]) -> list[str]:
    """One word -> four e4m3 of row g and four of g + 8, in the order k + 0, 2, 1, 3. Uses t, u, c, e.

    tables: of row g its bytes for magnitudes 0-3 and 4-7, then those of row g + 8. 16 instructions for 8 weights: the
    magnitudes of both rows become nibbles of c (bytes of g and of g + 8 in turn), by which the tables are looked up.
    """
    row_g, row_8 = rows
    low_g, high_g, low_8, high_8 = tables
    return [
        f"shf.r.wrap.b32 t, {word}, {word}, 6;",
        f"shl.b32 u, {word}, 8;",
        "and.b32 c, t, 0x00770077;",
        f"lop3.b32 c, c, u, 0x17001700, {_OR_AND};",
        f"lop3.b32 c, c, {word}, 0x60006000, {_OR_AND};",
        "prmt.b32 e, c, 0, 0x0020;",
        f"prmt.b32 e, {low_g}, {high_g}, e;",
        f"shr.u32 u, {word}, 8;",
        f"lop3.b32 e, e, u, 0x00800080, {_OR_AND};",
        f"shf.r.wrap.b32 u, {word}, {word}, 4;",
        f"lop3.b32 {row_g}, e, u, 0x80008000, {_OR_AND};",
        "prmt.b32 e, c, 0, 0x0031;",
        f"prmt.b32 e, {low_8}, {high_8}, e;",
        f"shr.u32 u, {word}, 2;",
        f"lop3.b32 e, e, u, 0x00800080, {_OR_AND};",
        f"lop3.b32 {row_8}, e, t, 0x80008000, {_OR_AND};",
    ]


def decode_words() -> tuple[str, str]:
    """Four words ($8 to $11) by tables ($12 to $15) -> registers [word][row g, g + 8]."""
    lines = ["{", ".reg .b32 t,u,c,e;"]
    for word in range(4):
        rows = (f"${2 * word}", f"${2 * word + 1}")
        lines += decode(f"${8 + word}", rows, ("$12", "$13", "$14", "$15"))
    return "\n".join([*lines, "}"]), ",".join(["=&r"] * 8 + ["r"] * 8)


def as_bytes() -> tuple[str, str]:
    """Eight registers as eight packs of four 8-bit elements: pack = 4, two inputs of four registers each."""
    return "\n".join(f"mov.b32 ${i}, ${8 + i};" for i in range(8)), ",".join(["=r"] * 8 + ["r"] * 8)
