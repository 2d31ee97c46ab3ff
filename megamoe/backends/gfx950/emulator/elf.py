"""The part of ELF that a code object uses: sections, symbols, notes. Little-endian 64-bit AMDGPU files only."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from megamoe.backends.gfx950.emulator.errors import CodeObjectError

EM_AMDGPU, ELFOSABI_AMDGPU_HSA = 224, 64
EF_MACH_MASK, EF_MACH_GFX950 = 0xFF, 0x4F
NT_AMDGPU_METADATA = 32


@dataclass(frozen=True, slots=True)
class Section:
    """One section: its bytes, and the address they are linked at."""

    name: str
    kind: int
    address: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Symbol:
    """One named symbol: its address, size in bytes and section index."""

    name: str
    address: int
    size: int
    section: int


def _text(table: bytes, offset: int) -> str:
    end = table.find(b"\0", offset)
    if end < 0:
        raise CodeObjectError(f"string at {offset} must end inside its table of {len(table)} bytes, got none")
    try:
        return table[offset:end].decode()
    except UnicodeDecodeError as error:
        raise CodeObjectError(f"string at {offset} must be UTF-8, got {table[offset:end]!r}") from error


class ElfFile:
    """A parsed file. Raises CodeObjectError naming the field when it is not a gfx950 code object."""

    def __init__(self, data: bytes) -> None:
        if len(data) < 64 or data[:4] != b"\x7fELF":
            raise CodeObjectError(f"code object must be an ELF file, got {data[:4]!r}")
        if data[4:6] != b"\x02\x01":
            raise CodeObjectError(f"ELF class and order must be 64-bit little-endian, got {data[4:6]!r}")
        if data[7] != ELFOSABI_AMDGPU_HSA:
            raise CodeObjectError(f"ELF OS ABI must be AMDGPU HSA ({ELFOSABI_AMDGPU_HSA}), got {data[7]}")
        self.abi_version = data[8]
        machine, flags = struct.unpack_from("<H", data, 18)[0], struct.unpack_from("<I", data, 48)[0]
        if machine != EM_AMDGPU:
            raise CodeObjectError(f"ELF machine must be AMDGPU ({EM_AMDGPU}), got {machine}")
        if flags & EF_MACH_MASK != EF_MACH_GFX950:
            raise CodeObjectError(
                f"ELF processor must be gfx950 ({EF_MACH_GFX950:#x}), got {flags & EF_MACH_MASK:#x}"
            )
        self.sections = self._sections(data)
        self.symbols = self._symbols()

    @staticmethod
    def _sections(data: bytes) -> list[Section]:
        table, size, count, names = (
            struct.unpack_from("<Q", data, 40)[0],
            *struct.unpack_from("<HHH", data, 58),
        )
        if size != 64 or table + size * count > len(data) or names >= count:
            raise CodeObjectError(f"section table must lie inside {len(data)} bytes, got {count} at {table}")
        heads = [struct.unpack_from("<IIQQQQIIQQ", data, table + size * k) for k in range(count)]
        for head in heads:
            if head[1] not in (0, 8) and head[4] + head[5] > len(data):
                raise CodeObjectError(
                    f"section must lie inside {len(data)} bytes, got {head[5]} at {head[4]}"
                )
        strings = data[heads[names][4] : heads[names][4] + heads[names][5]]
        return [
            Section(_text(strings, h[0]), h[1], h[3], b"" if h[1] in (0, 8) else data[h[4] : h[4] + h[5]])
            for h in heads
        ]

    def _symbols(self) -> list[Symbol]:
        tables = [s for s in self.sections if s.name in (".symtab", ".dynsym")]
        if not tables:
            raise CodeObjectError("code object must have a symbol table, got none")
        out: dict[str, Symbol] = {}
        for section in tables:
            strings = self.section(".strtab" if section.name == ".symtab" else ".dynstr").data
            for at in range(0, len(section.data) - 23, 24):
                name, _info, _other, index, address, size = struct.unpack_from("<IBBHQQ", section.data, at)
                if name:
                    symbol = Symbol(_text(strings, name), address, size, index)
                    out[symbol.name] = symbol
        return list(out.values())

    def section(self, name: str) -> Section:
        """The section called `name`. Raises CodeObjectError when there is none."""
        for section in self.sections:
            if section.name == name:
                return section
        raise CodeObjectError(
            f"code object must have a section {name}, got {[s.name for s in self.sections]}"
        )

    def bytes_at(self, address: int, size: int) -> bytes:
        """`size` bytes that are linked at `address`."""
        for section in self.sections:
            if (
                section.address
                and section.address <= address
                and address + size <= section.address + len(section.data)
            ):
                return section.data[address - section.address : address - section.address + size]
        raise CodeObjectError(
            f"address {address:#x} with {size} bytes must lie in a section, got none that holds it"
        )

    def metadata_note(self) -> bytes:
        """The msgpack bytes of the AMDGPU metadata note."""
        for section in self.sections:
            if section.kind != 7:
                continue
            at = 0
            while at + 12 <= len(section.data):
                name_size, size, kind = struct.unpack_from("<III", section.data, at)
                name = section.data[at + 12 : at + 12 + name_size].rstrip(b"\0")
                start = at + 12 + (name_size + 3 & ~3)
                if name == b"AMDGPU" and kind == NT_AMDGPU_METADATA:
                    return section.data[start : start + size]
                at = start + (size + 3 & ~3)
        raise CodeObjectError("code object must have an AMDGPU metadata note, got none")
