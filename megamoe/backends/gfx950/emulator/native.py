"""The C core as ctypes: its library and the layout of its structures."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from megamoe.backends.gfx950.emulator.build import build

BYTE_FIELDS = [
    "nsrc",
    "size",
    "neg",
    "abs",
    "neg_hi",
    "opsel",
    "opsel_hi",
    "clamp",
    "omod",
    "cbsz",
    "abid",
    "blgp",
    "sc0",
    "sc1",
    "nt",
    "lds",
    "offen",
    "idxen",
    "is_vector",
    "bitop3",
    "has_dpp",
    "has_sdwa",
    "bound_ctrl",
    "row_mask",
    "bank_mask",
    "dst_sel",
    "dst_unused",
    "src0_sel",
    "src1_sel",
    "src0_sext",
    "src1_sext",
    "bytes",
]
_OPERAND = np.dtype([("kind", "u1"), ("width", "u1"), ("idx", "<u2"), ("lo", "<u4"), ("hi", "<u4")])
_RANGE = np.dtype([("first", "<u2"), ("count", "<u2")])
INST = np.dtype(
    [
        ("fn", "<u8"),
        ("inner", "<u8"),
        ("offset", "<u4"),
        ("target", "<u4"),
        ("op", "<u2"),
        ("result_type", "<u2"),
    ]
    + [(name, "u1") for name in BYTE_FIELDS]
    + [
        ("dpp", "<u2"),
        ("simm", "<u2"),
        ("imm", "<i4"),
        ("imm1", "<i4"),
        ("dst", _OPERAND),
        ("sdst", _OPERAND),
    ]
    + [("src", _OPERAND, 6), ("nreads", "u1"), ("nwrites", "u1"), ("in_order", "u1"), ("scope", "u1")]
    + [("reads", _RANGE, 8), ("writes", _RANGE, 3)]
)
_U32, _U64 = ctypes.c_uint32, ctypes.c_uint64


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class Finding(ctypes.Structure):
    """One report of a detector, as the core keeps it."""

    _fields_ = _fields(_U32, "kind launch group wave inst o_launch o_group o_wave o_inst o_write") + _fields(
        _U64, "address extra"
    )


class Fault(ctypes.Structure):
    """What stopped the device."""

    _fields_ = (
        _fields(_U32, "code launch group wave inst lane")
        + _fields(_U64, "address extra")
        + _fields(ctypes.c_char * 256, "text")
    )


class CTraffic(ctypes.Structure):
    """Bytes moved by one launch."""

    _fields_ = (
        _fields(_U64 * 8 * 16 * 3, "bytes") + _fields(_U64 * 3, "remote_bytes") + _fields(_U64 * 2, "lds_bytes")
        + _fields(_U64, "dma_bytes instructions")
    )  # fmt: skip


class LaunchDesc(ctypes.Structure):
    """What the core needs to know of a launch."""

    _fields_ = (
        _fields(_U64, "prog num_insts")
        + _fields(_U32, "num_rows lds_bytes scratch_bytes num_user_sgprs rsrc2 properties mode")
        + _fields(_U32, "preload preload_offset entry")
        + _fields(ctypes.c_int32, "rank") + _fields(_U32 * 3, "grid block") + _fields(_U32, "num_deps")
        + _fields(_U32 * 32, "deps") + _fields(_U32, "kernarg_bytes") + _fields(_U64, "kernarg")
    )  # fmt: skip


def open_core(build: Callable[[], Path]) -> ctypes.CDLL:
    """The library that `build` names; a file that was damaged is built again once."""
    path = build()
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        path.unlink(missing_ok=True)
        return ctypes.CDLL(str(build()))


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The loaded core. Raises ToolchainError when it has to be compiled and cannot be."""
    lib = open_core(build)
    ptr, u64, u32 = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32
    signatures = {
        "emu_handler": (u64, [ctypes.c_char_p]), "emu_unimplemented": (u64, []), "emu_modified": (u64, []),
        "emu_sizeof": (u32, [u32]), "emu_num_ops": (u32, []), "emu_op_name": (ctypes.c_char_p, [u32]),
        "emu_new": (ptr, [u32] * 9), "emu_schedule": (None, [ptr, u32, u32]), "emu_free": (None, [ptr]),
        "emu_alloc_add": (ctypes.c_int, [ptr, u64, u64, ctypes.c_int32, u32, u32, u32, u32]),
        "emu_alloc_remove": (ctypes.c_int, [ptr, u64]), "emu_launch": (u32, [ptr, ctypes.POINTER(LaunchDesc)]),
        "emu_launch_done": (ctypes.c_int, [ptr, u32]), "emu_launch_counts": (ptr, [ptr, u32]),
        "emu_launch_traffic": (ctypes.POINTER(CTraffic), [ptr, u32]),
        "emu_step": (u32, [ptr, u64, ctypes.POINTER(u64)]), "emu_fault": (ctypes.POINTER(Fault), [ptr]),
        "emu_findings": (u32, [ptr, ctypes.POINTER(ctypes.POINTER(Finding))]), "emu_clear_findings": (None, [ptr]),
        "emu_waiting": (u32, [ptr, ptr, u32]), "emu_reset": (None, [ptr]), "emu_drop_launch": (None, [ptr, u32]),
    }  # fmt: skip
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    sizes = [INST.itemsize, ctypes.sizeof(Finding), ctypes.sizeof(Fault), ctypes.sizeof(CTraffic)]
    assert sizes == [lib.emu_sizeof(k) for k in range(4)], sizes
    return lib


def implemented() -> set[str]:
    """Mnemonics that the core executes."""
    lib = library()
    return {lib.emu_op_name(k).decode() for k in range(lib.emu_num_ops())}
