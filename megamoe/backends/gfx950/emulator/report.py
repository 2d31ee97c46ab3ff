"""What the device tells: faults, findings, who waits for whom, and the traffic of a launch, as text and numbers."""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from megamoe.backends.gfx950.emulator.code_object import Kernel
from megamoe.backends.gfx950.emulator.errors import (
    EmulatorError,
    FindingError,
    MemoryFaultError,
    UnimplementedInstructionError,
)
from megamoe.backends.gfx950.emulator.isa.text import disassemble
from megamoe.backends.gfx950.emulator.native import Finding

if TYPE_CHECKING:
    from megamoe.backends.gfx950.emulator.device import DeviceGroup

WIDTHS = (1, 2, 4, 8, 12, 16, 32, 64)
_KINDS = {
    1: "register used before its s_waitcnt", 2: "LDS race", 3: "LDS used before its s_waitcnt", 4: "global-memory race",
}  # fmt: skip
_FAULTS: dict[int, type[EmulatorError]] = {
    1: MemoryFaultError,
    2: UnimplementedInstructionError,
    3: MemoryFaultError,
}


def place(kernel: Kernel, inst: int) -> str:
    """Instruction `inst` of a kernel: byte offset, text and, where the code object has it, the source line."""
    if not 0 <= inst < len(kernel.instructions):
        return f"instruction {inst}"
    one = kernel.instructions[inst]
    line = kernel.line_of(one.offset)
    where = f" ({line[0]}:{line[1]})" if line else ""
    return f"+{one.offset:#x} `{disassemble(one)}`{where}"


@dataclass(frozen=True)
class Report:
    """One finding. `kind` is a short name; `text` names kernel, rank, workgroup, wave, instruction, address."""

    kind: str
    text: str
    kernel: str
    inst: int
    address: int


def describe_fault(group: DeviceGroup) -> tuple[str, type[EmulatorError]]:
    """Text and class of what stopped the device."""
    fault = group.lib.emu_fault(group.machine).contents
    kernel = group.kernels[fault.launch]
    one = kernel.instructions[fault.inst] if fault.inst < len(kernel.instructions) else None
    what = fault.text.decode()
    if fault.code == 2 and one is not None and what == "instruction is not implemented":
        what = f"instruction {one.mnemonic} is not implemented"
    lane = f", lane {fault.lane}" if fault.lane < 64 else ""
    nearest = _nearest(group, fault.address) if fault.code == 1 else ""
    where = f"{kernel.name}, workgroup {fault.group}, wave {fault.wave}{lane}, at {place(kernel, fault.inst)}"
    return f"{where}: {what}{nearest}", _FAULTS.get(fault.code, EmulatorError)


def _nearest(group: DeviceGroup, address: int) -> str:
    buffers = [b for b in group.buffers.values() if b.address <= address]
    if not buffers:
        return ""
    best = max(buffers, key=lambda b: b.address)
    distance = address - best.address
    return f"; the buffer before it is {best.name}, {best.num_bytes} bytes, {distance} bytes from its start"


def _where(group: DeviceGroup, address: int) -> str:
    buffer = group.find_buffer(address)
    return f"{address:#x}" + (f" ({buffer.name}+{address - buffer.address})" if buffer else "")


def describe_waiting(group: DeviceGroup, limit: int = 24) -> str:
    """Who waits for what: one clause per wave, polls with address and value seen."""
    rows = np.zeros((4096, 8), np.uint64)
    total = group.lib.emu_waiting(group.machine, rows.ctypes.data, len(rows))
    clauses = []
    for launch, flat, wave, state, inst, address, value, alive in rows[: min(total, limit)].tolist():
        kernel = group.kernels[launch]
        if state == 1:
            what = f"waits at {place(kernel, inst)} for the other waves of its {alive}"
        else:
            what = f"polls {_where(group, address)} and sees {value:#x} at {place(kernel, inst)}"
        clauses.append(f"{kernel.name} (launch {launch}) workgroup {flat} wave {wave} {what}")
    more = f"; and {total - limit} waves more" if total > limit else ""
    return f"{total} waves cannot go on: " + "; ".join(clauses) + more


def read_findings(group: DeviceGroup) -> list[Report]:
    """The detectors' findings as reports."""
    pointer = ctypes.POINTER(Finding)()
    count = group.lib.emu_findings(group.machine, ctypes.byref(pointer))
    out = []
    for k in range(count):
        f = pointer[k]
        kernel, kind = group.kernels[f.launch], _KINDS.get(f.kind, f"finding {f.kind}")
        text = f"{kind}: {kernel.name} (launch {f.launch}), workgroup {f.group}, wave {f.wave}, "
        text += f"at {place(kernel, f.inst)}"
        if f.kind == 1:
            register = f.address
            name = f"v{register}" if register < 1024 else f"s{register - 1024}"
            text += f" uses {name} of {place(kernel, f.o_inst)}"
        elif f.kind in (2, 3):
            text += f", LDS byte {f.address}, against {_access(f.o_write)} of wave {f.o_wave} "
            text += f"at {place(kernel, f.o_inst)}"
        else:
            other = group.kernels[f.o_launch]
            text += (
                f", address {_where(group, f.address)}, against {_access(f.o_write)} by "
                f"{other.name} (launch {f.o_launch}), workgroup {f.o_group}, wave {f.o_wave}, "
                f"at {place(other, f.o_inst)}"
            )
        out.append(Report(kind, text, kernel.name, f.inst, f.address))
    return out


def _access(write: int) -> str:
    return "a write" if write else "a read"


def raise_reports(reports: list[Report]) -> None:
    """Raise FindingError when there are reports."""
    if reports:
        raise FindingError(
            f"{len(reports)} findings: " + "\n".join(r.text for r in reports[:10]), tuple(reports)
        )


@dataclass(frozen=True)
class Traffic:
    """What one launch did. bytes[direction][class][width]: direction 0 load, 1 store, 2 atomic; width by `WIDTHS`.

    remote_bytes: to memory of other ranks, per direction. executed: wave instructions per mnemonic. num_waiting: those
    of them in spins, which depend on everything else that runs.
    """

    bytes: np.ndarray[tuple[int, int, int], np.dtype[np.uint64]]
    remote_bytes: tuple[int, int, int]
    lds_bytes: tuple[int, int]
    lds_dma_bytes: int
    executed: Counter[str]
    num_waiting: int

    @cached_property
    def num_instructions(self) -> int:
        """Dynamic wave instructions."""
        return sum(self.executed.values())

    @cached_property
    def num_mfma(self) -> int:
        """Dynamic matrix instructions."""
        return sum(count for name, count in self.executed.items() if name.startswith("v_mfma"))

    def loaded(self, klass: int, width: int | None = None) -> int:
        """Bytes loaded from an address class, by accesses of `width` bytes a lane or by all."""
        row = self.bytes[0][klass]
        return int(row.sum() if width is None else row[WIDTHS.index(width)])


def read_traffic(group: DeviceGroup, launch_idx: int, kernel: Kernel) -> Traffic:
    """The counters of a launch."""
    raw = group.lib.emu_launch_traffic(group.machine, launch_idx).contents
    counts = ctypes.cast(
        group.lib.emu_launch_counts(group.machine, launch_idx), ctypes.POINTER(ctypes.c_uint64)
    )
    executed: Counter[str] = Counter()
    for k, one in enumerate(kernel.instructions):
        if counts[k]:
            executed[one.mnemonic] += counts[k]
    waiting = sum(counts[k] for start, stop in kernel.spins for k in range(start, stop))
    table = np.ctypeslib.as_array(raw.bytes).copy()
    remote, lds = tuple(raw.remote_bytes), tuple(raw.lds_bytes)
    return Traffic(
        table, (remote[0], remote[1], remote[2]), (lds[0], lds[1]), raw.dma_bytes, executed, waiting
    )
