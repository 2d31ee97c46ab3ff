"""Source lines of machine code: the line program of `.debug_line`, DWARF 4 and 5.

Gives what reports print beside an instruction. A code object without the section, or with a form that is not read
here, has no lines; that is no error, because nothing but the reports' text depends on it.
"""

from __future__ import annotations

import struct
from bisect import bisect_right

from megamoe.backends.gfx950.emulator.elf import ElfFile

_FORM_STRING, _FORM_UDATA, _FORM_DATA16, _FORM_LINE_STRP, _FORM_DATA1, _FORM_DATA2 = (
    0x08,
    0x0F,
    0x1E,
    0x1F,
    0x0B,
    0x05,
)
_PATH, _DIRECTORY = 1, 2
Row = tuple[int, str, int]


class _Cursor:
    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data, self.at = data, at

    def fixed(self, form: str) -> int:
        value: int = struct.unpack_from("<" + form, self.data, self.at)[0]
        self.at += struct.calcsize(form)
        return value

    def uleb(self) -> int:
        value = shift = 0
        while True:
            byte = self.fixed("B")
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                return value

    def sleb(self) -> int:
        start = self.at
        value = self.uleb()
        bits = 7 * (self.at - start)
        return value - (1 << bits) if value >> (bits - 1) & 1 else value

    def text(self) -> str:
        end = self.data.index(b"\0", self.at)
        out = self.data[self.at : end].decode(errors="replace")
        self.at = end + 1
        return out


def _form(cursor: _Cursor, form: int, strings: bytes) -> int | str:
    if form == _FORM_STRING:
        return cursor.text()
    if form == _FORM_LINE_STRP:
        return _Cursor(strings, cursor.fixed("I")).text()
    if form == _FORM_UDATA:
        return cursor.uleb()
    if form == _FORM_DATA16:
        cursor.at += 16
        return 0
    if form in (_FORM_DATA1, _FORM_DATA2):
        return cursor.fixed("B" if form == _FORM_DATA1 else "H")
    raise ValueError(f"form {form:#x}")


def _names(cursor: _Cursor, strings: bytes) -> list[tuple[str, int]]:
    formats = [(cursor.uleb(), cursor.uleb()) for _ in range(cursor.fixed("B"))]
    out, count = [], cursor.uleb()
    if count > len(cursor.data):
        raise ValueError(f"{count} names")
    for _ in range(count):
        entry = {kind: _form(cursor, form, strings) for kind, form in formats}
        directory = entry.get(_DIRECTORY, 0)
        out.append((str(entry.get(_PATH, "")), directory if isinstance(directory, int) else 0))
    return out


def _files(cursor: _Cursor, version: int, strings: bytes) -> list[str]:
    """File names by number: from 0 in DWARF 5, from 1 before."""
    if version >= 5:
        _names(cursor, strings)
        return [name for name, _ in _names(cursor, strings)]
    while cursor.text():
        pass
    out = [""]
    while name := cursor.text():
        cursor.uleb(), cursor.uleb(), cursor.uleb()
        out.append(name)
    return out


def _unit(cursor: _Cursor, strings: bytes) -> list[Row]:
    end = cursor.fixed("I") + cursor.at
    version = cursor.fixed("H")
    if version >= 5:
        cursor.at += 2  # address and segment size
    program = cursor.fixed("I") + cursor.at
    min_length, _max_ops, _is_stmt = cursor.fixed("B"), cursor.fixed("B"), cursor.fixed("B")
    line_base, line_range, opcode_base = cursor.fixed("b"), cursor.fixed("B"), cursor.fixed("B")
    lengths = [cursor.fixed("B") for _ in range(opcode_base - 1)]
    files = _files(cursor, version, strings)
    cursor.at = program
    rows: list[Row] = []
    address, file, line = 0, 1, 1

    def row() -> None:
        rows.append((address, files[file] if file < len(files) else "", line))

    while cursor.at < end:
        opcode = cursor.fixed("B")
        if opcode >= opcode_base:
            step = opcode - opcode_base
            address += step // line_range * min_length
            line += line_base + step % line_range
            row()
        elif opcode == 0:
            length = cursor.uleb()
            following, kind = cursor.at + length, cursor.fixed("B")
            if kind == 1:
                rows.append((address, "", 0))
                address, file, line = 0, 1, 1
            elif kind == 2:
                address = cursor.fixed("Q")
            cursor.at = following
        elif opcode == 1:
            row()
        elif opcode == 2:
            address += cursor.uleb() * min_length
        elif opcode == 3:
            line += cursor.sleb()
        elif opcode == 4:
            file = cursor.uleb()
        elif opcode == 8:
            address += (255 - opcode_base) // line_range * min_length
        elif opcode == 9:
            address += cursor.fixed("H")
        else:
            for _ in range(lengths[opcode - 1]):
                cursor.uleb()
    cursor.at = end
    return rows


class LineTable:
    """File and line by linked address."""

    def __init__(self, elf: ElfFile) -> None:
        sections = {section.name: section.data for section in elf.sections}
        rows: list[Row] = []
        try:
            cursor = _Cursor(sections.get(".debug_line", b""))
            while cursor.at < len(cursor.data):
                rows += _unit(cursor, sections.get(".debug_line_str", b""))
        except (ValueError, IndexError, ZeroDivisionError, struct.error):
            rows = []
        self.rows = sorted(rows, key=lambda row: row[0])
        self._addresses = [row[0] for row in self.rows]

    def find(self, address: int) -> tuple[str, int] | None:
        """File name and line of the instruction at `address`, None where the table does not say."""
        at = bisect_right(self._addresses, address) - 1
        if at < 0 or not self.rows[at][2]:
            return None
        return self.rows[at][1], self.rows[at][2]
