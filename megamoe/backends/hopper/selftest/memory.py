"""Where rows lie: the same bits from the host, pinned, the GPU, memory between 16-byte borders and other processes'."""

from __future__ import annotations

import pickle
import subprocess
import sys

import torch

from megamoe.backends import share_memory
from megamoe.backends.hopper.backend import HopperBackend
from megamoe.backends.hopper.selftest.cases import PATHS, Case, batch_of, uneven
from megamoe.backends.hopper.selftest.oracle import Checks
from megamoe.backends.hopper.selftest.ranks import Place, Ranks, rows_of
from megamoe.batch import MoeBatch
from megamoe.bundle import Path
from megamoe.errors import InvalidArgumentError
from megamoe.memory import MemoryHandle, MemoryKind, OpenMemory
from megamoe.shape import MoeShape

_CHILD = """
import pickle, sys
from megamoe.backends.hopper.selftest import memory
memory.lend(*pickle.load(sys.stdin.buffer))
"""
_OUT_ALIGN = 1 << 12
_BUSY_CYCLES = 1 << 30
"""Half a second in which a caller's GPU has not come to its rows yet, and the rank must wait."""


def _each(batch: MoeBatch, out: torch.Tensor, move: object) -> tuple[MoeBatch, torch.Tensor]:
    assert callable(move)
    scales = batch.hidden_states_sf
    return (
        MoeBatch(
            move(batch.hidden_states),
            move(batch.topk_ids),
            move(batch.topk_weights),
            None if scales is None else move(scales),
        ),
        move(out),
    )


def _pinned(backend: HopperBackend, batch: MoeBatch, out: torch.Tensor) -> tuple[MoeBatch, torch.Tensor]:
    return _each(batch, out, torch.Tensor.pin_memory)


def _device(backend: HopperBackend, batch: MoeBatch, out: torch.Tensor) -> tuple[MoeBatch, torch.Tensor]:
    return _each(batch, out, lambda tensor: tensor.to(backend.device))


def _odd(backend: HopperBackend, batch: MoeBatch, out: torch.Tensor) -> tuple[MoeBatch, torch.Tensor]:
    """On the GPU, one element past a border."""

    def shift(tensor: torch.Tensor) -> torch.Tensor:
        room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=backend.device)
        return room[1:].view(tensor.shape).copy_(tensor)

    return _each(batch, out, shift)


def _rows(backend: HopperBackend, batch: MoeBatch, out: torch.Tensor) -> tuple[MoeBatch, torch.Tensor]:
    """Rows and results on the GPU, ids and weights on the host."""
    there, out = _device(backend, batch, out)
    return MoeBatch(there.hidden_states, batch.topk_ids, batch.topk_weights, there.hidden_states_sf), out


PLACES: dict[str, Place] = {
    "pinned": _pinned,
    "on the GPU": _device,
    "on the GPU, between borders": _odd,
    "on the GPU, ids on the host": _rows,
}


def check_places(ranks: Ranks, checks: Checks) -> None:
    """Every path gives the bits of rows on the host, wherever rows lie, and with host rows copied ahead as well."""
    shape = ranks.shape
    for path in [path for path in PATHS if ranks.bundle.capacities(path)]:
        for quantized in (False, True):
            case = Case(path, uneven(shape, 32), seed=41, quantized=quantized)
            want = rows_of(ranks.call(case))
            for name, place in PLACES.items():
                same = torch.equal(rows_of(ranks.call(case, place=place)), want)
                checks.check(f"{ranks.shape.name} {ranks.row_format} {case}: rows {name}", same)
            for backend in ranks.backends:
                backend.staging.in_place_bytes, usual = 0, backend.staging.in_place_bytes
            copied = [rows_of(ranks.call(case, place=place)) for place in (None, _pinned)]
            for backend in ranks.backends:
                backend.staging.in_place_bytes = usual
            same = all(torch.equal(rows, want) for rows in copied)
            checks.check(f"{ranks.shape.name} {ranks.row_format} {case}: rows copied ahead", same)


def _layout(shape: MoeShape, rows: int) -> tuple[int, int, int]:
    """(offset of hidden states, of results, bytes in all) of what a caller lends."""
    size = -(-rows * shape.hidden * 2 // _OUT_ALIGN) * _OUT_ALIGN
    return 0, size, 2 * size


def lend(kind: MemoryKind, device: str, case: Case, shape: MoeShape) -> None:
    """The caller, a process of its own: lends rank 0's rows, says how, and gives the results that it finds in its
    memory when it is told to."""
    batch = batch_of(case, shape, 0)
    rows_at, out_at, num_bytes = _layout(shape, batch.num_rows)
    memory = share_memory(num_bytes, kind=kind, device=device)
    there = memory.tensor(rows_at, tuple(batch.hidden_states.shape), torch.bfloat16)
    out = memory.tensor(out_at, tuple(batch.hidden_states.shape), torch.bfloat16).fill_(float("nan"))
    rows = batch.hidden_states.to(there.device)
    if there.is_cuda:
        torch.cuda._sleep(_BUSY_CYCLES)
    there.copy_(rows)
    memory.publish()
    pickle.dump(memory.handle, sys.stdout.buffer)
    sys.stdout.buffer.flush()
    sys.stdin.buffer.read(1)
    pickle.dump(out.cpu(), sys.stdout.buffer)
    sys.stdout.buffer.flush()
    sys.stdin.buffer.read()
    memory.close()


def check_lent_memory(ranks: Ranks, checks: Checks) -> None:
    """Rank 0's rows and results are in memory of another process, of the GPU and of the host."""
    shape, backend = ranks.shape, ranks.backends[0]
    for kind, device in ((MemoryKind.CUDA_IPC, str(backend.device)), (MemoryKind.POSIX_SHM, "")):
        case = Case(Path.FIXED_SLOT, uneven(shape, 32), seed=43)
        want = rows_of(ranks.call(case))
        command = [sys.executable, "-c", _CHILD]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdin
            assert child.stdout
            pickle.dump((kind, device, case, shape), child.stdin)
            child.stdin.flush()
            handle: MemoryHandle = pickle.load(child.stdout)
            memories = [backend.open_memory(handle) for _ in range(2)]
            memories[1].close()
            got = rows_of(ranks.call(case, place=_lent(memories[0], backend, shape)))
            child.stdin.write(b"!")
            child.stdin.flush()
            seen: torch.Tensor = pickle.load(child.stdout)
            memories[0].close()
            child.stdin.close()
        checks.check(f"{kind}: rows in memory of another process", torch.equal(got, want))
        checks.check(f"{kind}: that process finds its results", torch.equal(seen, want[: len(seen)]))
    _check_refusals(ranks, checks)


def _lent(memory: OpenMemory, backend: HopperBackend, shape: MoeShape) -> Place:
    def place(of_rank: HopperBackend, batch: MoeBatch, out: torch.Tensor) -> tuple[MoeBatch, torch.Tensor]:
        if of_rank is not backend:
            return batch, out
        rows_at, out_at, _ = _layout(shape, batch.num_rows)
        size = (batch.num_rows, shape.hidden)
        rows = memory.tensor(rows_at, size, torch.bfloat16)
        there = MoeBatch(rows, batch.topk_ids, batch.topk_weights)
        return there, memory.tensor(out_at, size, torch.bfloat16)

    return place


def _check_refusals(ranks: Ranks, checks: Checks) -> None:
    """What cannot be opened is refused by name."""
    backend = ranks.backends[0]
    own = share_memory(1 << 21, kind=MemoryKind.CUDA_IPC, device=str(backend.device))
    nothing = MemoryHandle(
        kind=MemoryKind.CUDA_IPC, payload=bytes(128), offset=0, num_bytes=64, device=own.handle.device
    )
    elsewhere = MemoryHandle(
        kind=MemoryKind.CUDA_IPC, payload=bytes(64), offset=0, num_bytes=64, device="GPU-none"
    )
    for handle, said in ((own.handle, "of this one"), (nothing, "CUDA_ERROR"), (elsewhere, "memory.device")):
        try:
            backend.open_memory(handle)
            answer = "opened"
        except InvalidArgumentError as error:
            answer = str(error)
        checks.check(f"refused: {said}", said in answer, answer)
    own.close()
