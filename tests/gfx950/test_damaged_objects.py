"""Damaged code objects end in an error that names the field, and a launch never goes where it must not."""

from __future__ import annotations

import struct
from collections import Counter

import numpy as np
import pytest

from megamoe.backends.gfx950.build import KernelSpec, load_or_compile
from megamoe.backends.gfx950.emulator.code_object import CodeObject, _args
from megamoe.backends.gfx950.emulator.device import DeviceConfig, DeviceGroup
from megamoe.backends.gfx950.emulator.elf import ElfFile
from megamoe.backends.gfx950.emulator.errors import CodeObjectError, EmulatorError, MemoryFaultError
from megamoe.backends.gfx950.emulator.msgpack import unpack

from .assembly import kernel_of

SPEC = KernelSpec.of("close", ABORT=0, NUM_RANKS=8)


def read_all(data: bytes) -> None:
    """Everything that a launch would ask of a code object."""
    for kernel in CodeObject(data).kernels.values():
        assert kernel.instructions
        _ = kernel.spills, kernel.vgpr_count, kernel.sgpr_count, kernel.max_block_size, kernel.line_of(0)
        kernel.pack([0] * len(kernel.explicit_args), (1, 1, 1), (64, 1, 1))


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """Cut short, or with one to three bytes changed: anywhere, in the header, the section table or the metadata."""
    table = struct.unpack_from("<Q", data, 40)[0]
    note = data.find(b"amdhsa.kernels") - 100
    low, high = [(0, 0), (0, len(data)), (0, 64), (table, len(data)), (note, note + 1500)][rng.integers(5)]
    if not high:
        return data[: rng.integers(len(data))]
    out = bytearray(data)
    for at in rng.integers(low, high, rng.integers(1, 4)):
        out[at] = rng.integers(256)
    return bytes(out)


def test_damaged_files_are_read_or_refused_by_name() -> None:
    data, rng, ends = load_or_compile(SPEC).code, np.random.default_rng(3), Counter[str]()
    for _ in range(1500):
        try:
            read_all(damaged(data, rng))
            ends["read"] += 1
        except EmulatorError as error:
            ends[type(error).__name__] += 1
    assert sum(ends.values()) == 1500
    assert min(ends[name] for name in ("read", "CodeObjectError", "DecodeError")) > 10


@pytest.mark.parametrize(
    ("at", "form", "value", "match"),
    [
        (58, "H", 20, "user registers of close_kernel.* must be from 22 to 16, got 2"),
        (58, "H", 1 | 200 << 7, "user registers of close_kernel.* must be from 3 to 16, got 2"),
        (56, "H", 8 | 1 << 10, "properties of close_kernel.* must be those of wave64"),
        (56, "H", 8 | 4, "user registers of close_kernel.* must be from 4 to 16, got 2"),
        (52, "I", 0x84 | 1 << 10, "without workgroup info"),
        (52, "I", 31 << 1, "user registers of close_kernel.* must be from 2 to 16, got 31"),
        (24, "I", 1, "reserved bytes of the kernel descriptor must be zero"),
    ],
)  # fmt: skip
def test_descriptors_that_no_wave_can_start_from(at: int, form: str, value: int, match: str) -> None:
    data = bytearray(load_or_compile(SPEC).code)
    file = ElfFile(bytes(data))
    (descriptor,) = (symbol for symbol in file.symbols if symbol.name.endswith(".kd"))
    place = data.find(file.bytes_at(descriptor.address, 64))
    struct.pack_into("<" + form, data, place + at, value)
    with pytest.raises(CodeObjectError, match=match):
        CodeObject(bytes(data))


def test_preloaded_arguments_lie_in_the_segment() -> None:
    data = bytearray(load_or_compile(SPEC).code)
    file = ElfFile(bytes(data))
    (descriptor,) = (symbol for symbol in file.symbols if symbol.name.endswith(".kd"))
    place = data.find(file.bytes_at(descriptor.address, 64))
    struct.pack_into("<I", data, place + 52, 0x80 | 3 << 1)
    struct.pack_into("<H", data, place + 58, 1 | 200 << 7)
    with pytest.raises(
        CodeObjectError, match="preloaded arguments of .* must end at or before byte .*, got 804"
    ):
        CodeObject(bytes(data))


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"\x91" * 5000, "nest at most 32 deep"), (b"\xdd\xff\xff\xff\xff", "hold 1 more bytes"),
        (b"\xa2\xff\xfe", "UTF-8"), (b"\xc7", "plain msgpack"), (b"\x81\xc0\x01", "key must be"),
        (b"\x01\x02", "1 bytes more"),
    ],
)  # fmt: skip
def test_metadata_that_is_no_value(data: bytes, match: str) -> None:
    with pytest.raises(CodeObjectError, match=match):
        unpack(data)


@pytest.mark.parametrize(
    ("entry", "match"),
    [
        ("text", "argument 0 of k must be a map"), ({}, "must have offset, size and value kind"),
        ({".offset": -8, ".size": 8, ".value_kind": "by_value"}, "must lie in 16 bytes, got 8 at -8"),
        ({".offset": 8, ".size": 0, ".value_kind": "by_value"}, "must lie in 16 bytes, got 0 at 8"),
        ({".offset": 12, ".size": 8, ".value_kind": "by_value"}, "must lie in 16 bytes, got 8 at 12"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_lie_in_their_segment(entry: object, match: str) -> None:
    with pytest.raises(CodeObjectError, match=match):
        _args("k", {".kernarg_segment_size": 16, ".args": [entry]})


@pytest.mark.parametrize(
    ("grid", "match"),
    [
        ((65536, 65536, 2), r"below 2\^31 workgroups"), ((1 << 30, 1, 1), r"2\^32 items an axis"),
        ((0,), "at least 1"), ((1, 1, 1, 1), "up to three"),
    ],
)  # fmt: skip
def test_grids_that_cannot_be_counted(grid: tuple[int, ...], match: str) -> None:
    with DeviceGroup(DeviceConfig()) as group, pytest.raises(EmulatorError, match=match):
        group.devices[0].default_stream.launch(kernel_of(""), grid, (64,), [0, 0])


# Lane 5 has an address (v[2:3]) or offset (v8) at the very end; the others have one that is fine.
LAST_ADDRESS = """s_load_dwordx4 s[4:7], s[0:1], 0x0
s_waitcnt lgkmcnt(0)
v_mov_b32_e32 v2, s6
v_mov_b32_e32 v3, s7
v_mov_b32_e32 v8, 0
v_cmp_eq_u32_e32 vcc, 5, v0
v_cndmask_b32_e64 v2, v2, -4, vcc
v_cndmask_b32_e64 v3, v3, -1, vcc
v_cndmask_b32_e64 v8, v8, -8, vcc
s_mov_b32 s8, s6
s_mov_b32 s9, s7
s_mov_b32 s10, {limit}
s_mov_b32 s11, 0x00027000
"""


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        ("global_load_dword v5, v[2:3], off", -1), ("global_store_dword v[2:3], v0, off", -1),
        ("global_store_dwordx4 v[2:3], v[4:7], off", -1), ("global_atomic_add v[2:3], v0, off", -1),
        ("flat_load_dword v5, v[2:3]", -1), ("buffer_load_dword v5, v8, s[8:11], 0 offen", -1),
        ("buffer_load_dwordx4 v[4:7], v8, s[8:11], 0 offen offset:248", 260),
    ],
)  # fmt: skip
def test_one_lane_at_the_end_of_the_address_space(body: str, limit: int) -> None:
    """Even where its end comes round to 0, or a descriptor's limit lies past the allocation: a fault, never a crash."""
    with DeviceGroup(DeviceConfig()) as group:
        target = group.devices[0].allocate(256, "target")
        kernel = kernel_of(LAST_ADDRESS.format(limit=limit) + body)
        group.devices[0].default_stream.launch(kernel, (1,), (64,), [0, target.address])
        with pytest.raises(MemoryFaultError, match="outside of|in no aperture"):
            group.synchronize()
