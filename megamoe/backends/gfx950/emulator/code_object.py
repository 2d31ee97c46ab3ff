"""A code object (HSACO) and its kernels: metadata read strictly, kernel descriptor, machine code, arguments.

Owns: what a launch needs to know of a kernel. Refuses: another target, metadata that contradicts the descriptor,
kernels of wave32, and user registers that this device does not set up.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megamoe.backends.gfx950.emulator.elf import ElfFile
from megamoe.backends.gfx950.emulator.errors import CodeObjectError
from megamoe.backends.gfx950.emulator.isa.decode import decode
from megamoe.backends.gfx950.emulator.isa.instruction import Instruction
from megamoe.backends.gfx950.emulator.lines import LineTable
from megamoe.backends.gfx950.emulator.msgpack import unpack

_HIDDEN = (
    *(f"hidden_{what}_{axis}" for what in ("block_count", "group_size", "remainder") for axis in "xyz"),
    "hidden_grid_dims",
)
_USER_SGPRS = (4, 2, 2, 2, 2, 2, 1)
"""Scalar registers that each of the first bits of a descriptor's properties asks for."""
_OTHER_PROPERTIES = 0xF780
"""Wave32, and bits that are reserved."""
_MAX_USER_SGPRS = 16


@dataclass(frozen=True, slots=True)
class KernelArg:
    """One argument: byte offset and size in the kernarg segment; `kind` is metadata's value kind."""

    name: str
    offset: int
    size: int
    kind: str

    @property
    def hidden(self) -> bool:
        """Whether the device fills it in, not the caller."""
        return self.kind.startswith("hidden_")


@dataclass(frozen=True, slots=True)
class Descriptor:
    """The 64-byte kernel descriptor, as the command processor reads it."""

    lds_bytes: int
    scratch_bytes: int
    kernarg_bytes: int
    entry_offset: int
    rsrc1: int
    rsrc2: int
    rsrc3: int
    properties: int
    preload: int

    @classmethod
    def parse(cls, data: bytes) -> Descriptor:
        """Read 64 bytes. Raises CodeObjectError when reserved bytes are set."""
        lds, scratch, kernarg, r0, entry = struct.unpack_from("<IIIIq", data)
        rsrc3, rsrc1, rsrc2, properties, preload = struct.unpack_from("<IIIHH", data, 44)
        if r0 or any(data[24:44]):
            raise CodeObjectError("reserved bytes of the kernel descriptor must be zero, got others")
        return cls(lds, scratch, kernarg, entry, rsrc1, rsrc2, rsrc3, properties, preload)

    @property
    def num_user_sgprs(self) -> int:
        """Scalar registers set before the workgroup ids."""
        return self.rsrc2 >> 1 & 0x1F

    @property
    def num_vgprs(self) -> int:
        """Allocated vector registers, accumulation registers included (unified file, granule 8)."""
        return ((self.rsrc1 & 0x3F) + 1) * 8

    @property
    def accum_offset(self) -> int:
        """Index in the unified file of the first accumulation register."""
        return ((self.rsrc3 & 0x3F) + 1) * 4

    @property
    def float_mode(self) -> int:
        """Initial MODE bits 0-9: rounding, denormals, dx10_clamp, ieee."""
        mode = self.rsrc1 >> 12 & 0xFF
        return mode | (self.rsrc1 >> 21 & 1) << 8 | (self.rsrc1 >> 23 & 1) << 9

    def check_user_sgprs(self, name: str) -> None:
        """Raise CodeObjectError when a wave cannot start as the descriptor of `name` says."""
        if self.properties & _OTHER_PROPERTIES or self.rsrc2 >> 10 & 1:
            raise CodeObjectError(
                f"properties of {name} must be those of wave64 without workgroup info, got {self.properties:#x}"
            )
        length, offset = self.preload_sgprs
        asked = length + sum(n for bit, n in enumerate(_USER_SGPRS) if self.properties >> bit & 1)
        if not asked <= self.num_user_sgprs <= _MAX_USER_SGPRS:
            raise CodeObjectError(
                f"user registers of {name} must be from {asked} to {_MAX_USER_SGPRS}, got {self.num_user_sgprs}"
            )
        if 4 * (offset + length) > self.kernarg_bytes:
            raise CodeObjectError(
                f"preloaded arguments of {name} must end at or before byte {self.kernarg_bytes}, got "
                f"{4 * (offset + length)}"
            )

    @property
    def preload_sgprs(self) -> tuple[int, int]:
        """Dwords and dword offset of kernel arguments that are loaded into user registers before the start."""
        return self.preload & 0x7F, self.preload >> 7


@dataclass(frozen=True)
class Kernel:
    """One kernel of a code object: name, resources, arguments, code."""

    name: str
    descriptor: Descriptor
    code: bytes
    args: tuple[KernelArg, ...]
    metadata: Mapping[str, object]
    lines: LineTable | None = None
    address: int = 0

    @cached_property
    def instructions(self) -> list[Instruction]:
        """The decoded code."""
        return decode(self.code)

    @cached_property
    def loops(self) -> list[tuple[int, int]]:
        """Index of the first instruction of each loop and of the one behind it, by its backward branch."""
        at = {one.offset: k for k, one in enumerate(self.instructions)}
        return [
            (at[one.target], k + 1)
            for k, one in enumerate(self.instructions)
            if one.is_branch and one.target is not None and at.get(one.target, k + 1) <= k
        ]

    @cached_property
    def spins(self) -> list[tuple[int, int]]:
        """Loops that sleep, the innermost only: waves wait in them for others."""
        sleep = [k for k, one in enumerate(self.instructions) if one.mnemonic == "s_sleep"]
        sleeping = [(start, stop) for start, stop in self.loops if any(start <= k < stop for k in sleep)]
        return [
            (start, stop)
            for start, stop in sleeping
            if not any((start, stop) != one and start <= one[0] and one[1] <= stop for one in sleeping)
        ]

    def _count(self, key: str) -> int:
        value = self.metadata.get(key)
        if not isinstance(value, int):
            raise CodeObjectError(f"metadata {key} of {self.name} must be a number, got {value!r}")
        return value

    @property
    def vgpr_count(self) -> int:
        """Vector registers used, as the compiler reports them (accumulation registers included)."""
        return self._count(".vgpr_count")

    @property
    def sgpr_count(self) -> int:
        """Scalar registers used."""
        return self._count(".sgpr_count")

    @property
    def spills(self) -> tuple[int, int]:
        """Vector and scalar registers spilled."""
        return self._count(".vgpr_spill_count"), self._count(".sgpr_spill_count")

    @property
    def lds_bytes(self) -> int:
        """Static LDS of a workgroup in bytes."""
        return self._count(".group_segment_fixed_size")

    @property
    def scratch_bytes(self) -> int:
        """Scratch of a lane in bytes."""
        return self._count(".private_segment_fixed_size")

    @property
    def max_block_size(self) -> int:
        """Most work-items in a workgroup."""
        return self._count(".max_flat_workgroup_size")

    def line_of(self, offset: int) -> tuple[str, int] | None:
        """Source file and line of the instruction at byte `offset`, where the code object says it."""
        return self.lines.find(self.address + offset) if self.lines else None

    @property
    def explicit_args(self) -> tuple[KernelArg, ...]:
        """Arguments that the caller gives."""
        return tuple(arg for arg in self.args if not arg.hidden)

    def pack(self, values: Sequence[int | float | bytes], grid: Sequence[int], block: Sequence[int]) -> bytes:
        """The kernarg segment. An int is stored in the argument's size, a float as float32 or float64, bytes as is.

        grid: workgroups per axis; block: work-items per axis. Raises CodeObjectError when the number or size of the
        values does not match the metadata.
        """
        explicit = self.explicit_args
        if len(values) != len(explicit):
            raise CodeObjectError(f"arguments of {self.name} must be {len(explicit)}, got {len(values)}")
        out = bytearray(max(self.descriptor.kernarg_bytes, 4))
        for arg, value in zip(explicit, values):
            if isinstance(value, float):
                data = struct.pack("<d" if arg.size == 8 else "<f", value)
            elif isinstance(value, int):
                bits = 8 * arg.size
                if not -(1 << bits - 1) <= value < 1 << bits:
                    raise CodeObjectError(f"argument {arg.name} must fit {arg.size} bytes, got {value}")
                data = (value & (1 << bits) - 1).to_bytes(arg.size, "little")
            else:
                data = bytes(value)
            if len(data) != arg.size:
                raise CodeObjectError(f"argument {arg.name} must have {arg.size} bytes, got {len(data)}")
            out[arg.offset : arg.offset + arg.size] = data
        hidden = [*grid, *block, 0, 0, 0, sum(1 for n in grid if n > 1) or 1]
        for arg in self.args:
            if arg.kind in _HIDDEN:
                value = hidden[_HIDDEN.index(arg.kind)]
                out[arg.offset : arg.offset + arg.size] = value.to_bytes(arg.size, "little")
        return bytes(out)


class CodeObject:
    """A gfx950 code object. `kernels` maps names to kernels. Raises CodeObjectError for anything malformed."""

    def __init__(self, data: bytes) -> None:
        self.elf = ElfFile(data)
        self.lines = LineTable(self.elf)
        meta = unpack(self.elf.metadata_note())
        if not isinstance(meta, dict):
            raise CodeObjectError(f"metadata must be a map, got {type(meta).__name__}")
        target, version = meta.get("amdhsa.target"), meta.get("amdhsa.version")
        if (
            not isinstance(target, str)
            or "-amd-amdhsa-" not in target
            or target.split("-")[-1].split(":")[0] != "gfx950"
        ):
            raise CodeObjectError(f"amdhsa.target must be gfx950 on amdhsa, got {target!r}")
        if not isinstance(version, list) or version[:1] != [1]:
            raise CodeObjectError(f"amdhsa.version must be 1.x, got {version!r}")
        entries = meta.get("amdhsa.kernels")
        if not isinstance(entries, list) or not entries:
            raise CodeObjectError(f"amdhsa.kernels must be a list of kernels, got {entries!r}")
        self.target = target
        self.kernels: dict[str, Kernel] = {}
        for entry in entries:
            kernel = self._kernel(entry)
            self.kernels[kernel.name] = kernel

    def _kernel(self, entry: object) -> Kernel:
        if not isinstance(entry, dict) or not isinstance(entry.get(".name"), str):
            raise CodeObjectError(f"kernel metadata must be a map with a .name, got {entry!r}")
        meta: dict[str, object] = {str(key): value for key, value in entry.items()}
        name = str(meta[".name"])
        symbols = {symbol.name: symbol for symbol in self.elf.symbols}
        for needed in (name, str(meta.get(".symbol"))):
            if needed not in symbols:
                raise CodeObjectError(f"kernel {name} must have the symbol {needed}, got none")
        where = symbols[str(meta[".symbol"])].address
        descriptor = Descriptor.parse(self.elf.bytes_at(where, 64))
        descriptor.check_user_sgprs(name)
        code = symbols[name]
        if where + descriptor.entry_offset != code.address:
            raise CodeObjectError(
                f"entry of {name} must be its symbol {code.address:#x}, got {where + descriptor.entry_offset:#x}"
            )
        if meta.get(".wavefront_size") != 64:
            raise CodeObjectError(f"wave size of {name} must be 64, got {meta.get('.wavefront_size')!r}")
        pairs = (
            (".group_segment_fixed_size", descriptor.lds_bytes),
            (".private_segment_fixed_size", descriptor.scratch_bytes),
            (".kernarg_segment_size", descriptor.kernarg_bytes),
        )
        for key, value in pairs:
            if meta.get(key) != value:
                raise CodeObjectError(
                    f"metadata {key} of {name} must equal the descriptor's {value}, got {meta.get(key)!r}"
                )
        return Kernel(
            name,
            descriptor,
            self.elf.bytes_at(code.address, code.size),
            _args(name, meta),
            meta,
            self.lines,
            code.address,
        )


def _args(name: str, meta: Mapping[str, object]) -> tuple[KernelArg, ...]:
    entries = meta.get(".args", [])
    size = meta.get(".kernarg_segment_size")
    if not isinstance(entries, list) or not isinstance(size, int):
        raise CodeObjectError(f"arguments of {name} must be a list with a segment size, got {entries!r}")
    out: list[KernelArg] = []
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise CodeObjectError(f"argument {index} of {name} must be a map, got {entry!r}")
        offset, length, kind = entry.get(".offset"), entry.get(".size"), entry.get(".value_kind")
        if not isinstance(offset, int) or not isinstance(length, int) or not isinstance(kind, str):
            raise CodeObjectError(
                f"argument {index} of {name} must have offset, size and value kind, got {entry!r}"
            )
        if offset < 0 or length < 1 or offset + length > size:
            raise CodeObjectError(
                f"argument {index} of {name} must lie in {size} bytes, got {length} at {offset}"
            )
        out.append(KernelArg(str(entry.get(".name", f"arg{index}")), offset, length, kind))
    return tuple(out)
