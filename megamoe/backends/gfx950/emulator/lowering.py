"""Decoded instructions as the core's array: handlers, operands in the unified register file, registers to watch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megamoe.backends.gfx950.emulator.code_object import Kernel
from megamoe.backends.gfx950.emulator.errors import CodeObjectError
from megamoe.backends.gfx950.emulator.isa.instruction import ACC_BASE, VCC, Instruction, Kind, Operand
from megamoe.backends.gfx950.emulator.native import BYTE_FIELDS, INST, implemented, library

SGPR_BASE = 1024
_NUM_SGPRS = 128
_FROM_MODS = set(BYTE_FIELDS) - {"nsrc", "size", "bytes"}
_F32, _F16, _F64 = 1, 2, 3
_READS_DST = ("fmac", "smfmac", "v_mac", "dot2c", "dot4c", "dot8c", "fma_mixlo", "fma_mixhi", "v_writelane")
_HANDLES_CLAMP = (
    "v_pk_", "v_fma_mix", "v_add_i32", "v_sub_i32", "v_add_i16", "v_sub_i16", "v_add_u32", "v_sub_u32", "v_subrev_u32",
    "v_add_u16", "v_sub_u16", "v_subrev_u16",
)  # fmt: skip


def _result_type(name: str) -> int:
    if name.startswith("v_cvt_"):
        kind = name.removeprefix("v_cvt_").split("_")[0]
    else:
        kind = name.rsplit("_", 1)[-1]
    return {"f32": _F32, "f16": _F16, "f64": _F64}.get(kind, 0)


def _scope(one: Instruction) -> int:
    sc0, sc1, name = one.mods.get("sc0", 0), one.mods.get("sc1", 0), one.mnemonic
    if "atomic" in name:
        return 3 if sc1 else 2
    return 3 if sc0 and sc1 else 2 if sc1 else 1 if sc0 else 0


def _vector_sources(name: str) -> tuple[int, ...]:
    """Sources that the encoding lets be anything and the instruction does not."""
    if name.startswith(("v_mfma", "v_smfmac", "v_cvt_scalef32_2xpk16")):
        return (0, 1)
    if "sad_" in name and name.startswith(("v_qsad", "v_mqsad")):
        return (2,)
    lanes = ("v_readlane", "v_permlane", "v_swap", "v_accvgpr_read", "v_accvgpr_mov")
    return (0,) if name.startswith((*lanes, "v_cvt_scalef32_pk32", "v_cvt_scalef32_sr_pk")) else ()


class _Lowering:
    """Turn decoded instructions into the core's array, for one kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.lib = library()
        self.index = {one.offset: k for k, one in enumerate(kernel.instructions)}
        self.handlers: dict[str, int] = {}

    def handler(self, name: str) -> int:
        if name not in self.handlers:
            self.handlers[name] = self.lib.emu_handler(name.encode())
        return self.handlers[name]

    def register(self, operand: Operand, one: Instruction) -> int:
        """Row of a vector register in the unified file."""
        descriptor = self.kernel.descriptor
        row = operand.idx if operand.idx < ACC_BASE else descriptor.accum_offset + operand.idx - ACC_BASE
        if row + operand.width > descriptor.num_vgprs:
            raise CodeObjectError(
                f"{self.kernel.name} at byte {one.offset:#x}: register rows of {one.mnemonic} must be below "
                f"{descriptor.num_vgprs}, got {row + operand.width - 1}"
            )
        return row

    def put(self, out: np.void, operand: Operand, one: Instruction) -> None:
        out["kind"], out["width"], out["idx"] = int(operand.kind), operand.width, operand.idx
        if operand.kind is Kind.VGPR:
            out["idx"] = self.register(operand, one)
        elif operand.kind is Kind.SGPR and operand.idx + operand.width > _NUM_SGPRS:
            raise CodeObjectError(
                f"{self.kernel.name} at byte {one.offset:#x}: scalar registers of {one.mnemonic} must be below "
                f"{_NUM_SGPRS}, got {operand.idx + operand.width - 1}"
            )
        elif operand.kind is Kind.CONST:
            out["lo"], out["hi"] = operand.value & 0xFFFFFFFF, operand.value >> 32 & 0xFFFFFFFF

    def ranges(self, operands: list[Operand], one: Instruction) -> list[tuple[int, int]]:
        out = []
        for operand in operands:
            if operand.kind is Kind.VGPR:
                out.append((self.register(operand, one), operand.width))
            elif operand.kind is Kind.SGPR and operand.idx < 124:
                out.append((SGPR_BASE + operand.idx, operand.width))
        return out

    def one(self, row: np.void, one: Instruction) -> None:
        name, mods = one.mnemonic, one.mods
        row["offset"], row["size"], row["nsrc"] = one.offset, one.size, len(one.srcs)
        for key in _FROM_MODS & mods.keys():
            row[key] = mods[key]
        row["dpp"], row["simm"] = mods.get("dpp", 0), mods.get("simm", 0)
        row["imm"], row["imm1"] = mods.get("offset", 0), mods.get("offset1", 0)
        row["scope"] = _scope(one) if one.encoding in ("FLAT", "MUBUF", "MTBUF") else 0
        row["bytes"] = min(4 * one.dst.width, 255) if one.encoding == "SMEM" else 0
        row["result_type"] = _result_type(name)
        # Results of these come in the order of issue, so that a register may be the target of two of them at once.
        plain_load = (
            name.startswith(("global_load_", "buffer_load_")) and "lds" not in name and not mods.get("lds")
        )
        row["in_order"] = 1 if plain_load else 2 if name.startswith("ds_read") else 0
        row["is_vector"] = one.encoding.startswith("VOP")
        self.put(row["dst"], one.dst, one)
        self.put(row["sdst"], one.sdst, one)
        for k, operand in enumerate(one.srcs):
            self.put(row["src"][k], operand, one)
        for k in _vector_sources(name):
            if one.srcs[k].kind is not Kind.VGPR:
                raise CodeObjectError(
                    f"{self.kernel.name} at byte {one.offset:#x}: source {k} of {name} must be a vector register, "
                    f"got {one.srcs[k].kind.name}"
                )
        if one.is_branch or name == "s_call_b64":
            if one.target not in self.index:
                raise CodeObjectError(
                    f"{self.kernel.name}: branch at {one.offset:#x} must hit an instruction, got {one.target:#x}"
                )
            row["target"] = self.index[one.target]
        handler = self.handler(name)
        if mods.get("gds"):  # there is no global data share
            handler = 0
        clamped = (mods.get("clamp") or mods.get("omod")) and not name.startswith(_HANDLES_CLAMP)
        if clamped and not row["result_type"] and not name.startswith("v_cmp"):
            handler = 0
        row["fn"] = row["inner"] = handler or self.lib.emu_unimplemented()
        if handler and (mods.get("has_dpp") or mods.get("has_sdwa") or (clamped and row["result_type"])):
            row["fn"] = self.lib.emu_modified()
        reads = list(one.srcs)
        if any(part in name for part in _READS_DST):
            reads.append(one.dst)
        if name.startswith(("s_cbranch_vcc", "v_div_fmas")):
            reads.append(Operand(Kind.SGPR, VCC, 2))
        writes = [one.dst, one.sdst]
        if "swap_b32" in name and one.srcs:
            writes.append(one.srcs[0])
        for key, limit, found in (
            ("reads", 8, self.ranges(reads, one)),
            ("writes", 3, self.ranges(writes, one)),
        ):
            row[f"n{key}"] = min(len(found), limit)
            for k, pair in enumerate(found[:limit]):
                row[key][k] = pair


def lower(kernel: Kernel) -> NDArray[np.void]:
    """The core's instruction array of a kernel. Raises CodeObjectError for registers or branches out of range."""
    lowering = _Lowering(kernel)
    out: NDArray[np.void] = np.zeros(len(kernel.instructions), INST)
    for k, one in enumerate(kernel.instructions):
        lowering.one(out[k], one)
    return out


def missing(kernel: Kernel) -> set[str]:
    """Mnemonics of a kernel that the core does not execute."""
    return {one.mnemonic for one in kernel.instructions} - implemented()
