"""Read the one msgpack value of a code object's metadata note. Strict: every byte must be used, no extensions."""

from __future__ import annotations

import struct

from megamoe.backends.gfx950.emulator.errors import CodeObjectError

Value = None | bool | int | float | str | bytes | list["Value"] | dict["Value", "Value"]
_FIXED = {
    0xCA: ">f",
    0xCB: ">d",
    0xCC: ">B",
    0xCD: ">H",
    0xCE: ">I",
    0xCF: ">Q",
    0xD0: ">b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
}
_SIZED = {0xC4: (1, "bin"), 0xC5: (2, "bin"), 0xC6: (4, "bin"), 0xD9: (1, "str"), 0xDA: (2, "str"), 0xDB: (4, "str"),
          0xDC: (2, "array"), 0xDD: (4, "array"), 0xDE: (2, "map"), 0xDF: (4, "map")}  # fmt: skip


_MAX_DEPTH = 32


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at, self.depth = data, 0, 0

    def take(self, count: int) -> bytes:
        if self.at + count > len(self.data):
            raise CodeObjectError(
                f"metadata must hold {count} more bytes at {self.at}, got {len(self.data) - self.at}"
            )
        self.at += count
        return self.data[self.at - count : self.at]

    def value(self) -> Value:
        tag = self.take(1)[0]
        if tag < 0x80:
            return tag
        if tag >= 0xE0:
            return tag - 0x100
        if tag < 0xC0:
            kind, count = (
                ("map", tag & 15) if tag < 0x90 else ("array", tag & 15) if tag < 0xA0 else ("str", tag & 31)
            )
            return self.sized(kind, count)
        if tag in (0xC0, 0xC2, 0xC3):
            return None if tag == 0xC0 else tag == 0xC3
        if tag in _FIXED:
            form = _FIXED[tag]
            number: int | float = struct.unpack(form, self.take(struct.calcsize(form)))[0]
            return number
        if tag in _SIZED:
            width, kind = _SIZED[tag]
            return self.sized(kind, int.from_bytes(self.take(width), "big"))
        raise CodeObjectError(f"metadata tag must be plain msgpack, got {tag:#x} at byte {self.at - 1}")

    def sized(self, kind: str, count: int) -> Value:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise CodeObjectError(f"metadata must nest at most {_MAX_DEPTH} deep, got more at byte {self.at}")
        out = self.parts(kind, count)
        self.depth -= 1
        return out

    def parts(self, kind: str, count: int) -> Value:
        if kind == "str":
            raw = self.take(count)
            try:
                return raw.decode()
            except UnicodeDecodeError as error:
                raise CodeObjectError(f"metadata text must be UTF-8, got {raw[:40]!r}") from error
        if kind == "bin":
            return self.take(count)
        if kind == "array":
            return [self.value() for _ in range(count)]
        out: dict[Value, Value] = {}
        for _ in range(count):
            key = self.value()
            if not isinstance(key, (str, int)):
                raise CodeObjectError(f"metadata key must be a string or a number, got {key!r}")
            out[key] = self.value()
        return out


def unpack(data: bytes) -> Value:
    """The value that `data` holds. Raises CodeObjectError when bytes are missing or left over."""
    reader = _Reader(data)
    out = reader.value()
    if reader.at != len(data):
        raise CodeObjectError(f"metadata must end after its value, got {len(data) - reader.at} bytes more")
    return out
