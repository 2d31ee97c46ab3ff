"""Memory that one process lends and another one opens: what lies inside, what is refused, and that nothing stays."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from megamoe import MemoryHandle, MemoryKind, Runtime, SharedMemory, remove_unowned, share_memory
from megamoe.errors import ConfigError, InvalidArgumentError
from megamoe.memory import HostMemory
from tests.megamoe.groups import SHAPE, deployment

_LENDER = """
import sys, torch
from megamoe import share_memory
memory = share_memory(4096)
memory.tensor(64, (4,), torch.float32).copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
print(memory.handle.payload.decode(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def lent() -> Iterator[SharedMemory]:
    memory = share_memory(10_000)
    yield memory
    memory.close()
    assert not os.path.exists(f"/dev/shm/{memory.handle.payload.decode()}")


def test_both_sides_see_the_same_bytes(lent: SharedMemory) -> None:
    opened = HostMemory.open(replace(lent.handle, offset=32, num_bytes=4096))
    opened.tensor(0, (2, 3), torch.bfloat16).fill_(1.5)
    assert lent.tensor(32, (6,), torch.bfloat16).tolist() == [1.5] * 6
    opened.close()
    assert os.path.exists(f"/dev/shm/{lent.handle.payload.decode()}"), "only its owner ends it while it lives"


@pytest.mark.parametrize(
    ("offset", "shape", "said"),
    [
        (8, (1,), "offset in memory must be a multiple of 16, got 8"),
        (-16, (1,), "inside its 4096 bytes"),
        (4096, (1,), r"bytes \[4096, 4100\)"),
        (0, (2**40, 2**40), "inside its 4096 bytes"),
        (0, (-1, -2), "inside its 4096 bytes"),
    ],
)
def test_tensors_outside_are_refused(
    lent: SharedMemory, offset: int, shape: tuple[int, ...], said: str
) -> None:
    opened = HostMemory.open(replace(lent.handle, num_bytes=4096))
    with pytest.raises(InvalidArgumentError, match=said):
        opened.tensor(offset, shape, torch.float32)
    opened.close()


def test_handles_that_cannot_be_are_refused(lent: SharedMemory) -> None:
    handle = lent.handle
    for wrong, said in (
        ({"kind": "rdma"}, "memory.kind must be one of posix_shm, cuda_ipc, got 'rdma'"),
        ({"payload": b""}, "memory.payload must be 1 to 256 bytes, got 0"),
        ({"num_bytes": 0}, "memory.num_bytes"),
        ({"offset": 2**62}, "memory.offset"),
        ({"offset": 8}, "memory.offset must be a multiple of 16, got 8"),
    ):
        with pytest.raises(InvalidArgumentError, match=said):
            replace(handle, **wrong)
    for wrong, said in (
        ({"payload": b"megamoe-memory-none"}, "shared memory that is there"),
        ({"payload": b"megamoe-g-board"}, "a name like megamoe-memory-"),
        ({"payload": b"../etc/passwd"}, "a name like megamoe-memory-"),
        ({"payload": b"megamoe-memory-/../x"}, "without '/'"),
        ({"num_bytes": handle.num_bytes + 1}, "inside the 12288 bytes"),
        ({"device": "GPU-0"}, "posix_shm on the host, got posix_shm on GPU-0"),
        ({"kind": "cuda_ipc"}, "posix_shm on the host, got cuda_ipc"),
    ):
        with pytest.raises(InvalidArgumentError, match=said):
            HostMemory.open(replace(handle, **wrong))


def test_a_runtime_opens_what_its_backend_can(lent: SharedMemory) -> None:
    shape = replace(SHAPE, num_ranks=1, num_layers=1)
    with Runtime.open(deployment(shape), rank=0, group_name=f"megamoe-test-memory-{os.getpid()}") as runtime:
        opened = runtime.open_memory(lent.handle)
        assert opened.num_bytes == lent.num_bytes
        opened.close()
        foreign = MemoryHandle(
            kind=MemoryKind.CUDA_IPC, payload=bytes(64), offset=0, num_bytes=64, device="GPU-1"
        )
        with pytest.raises(InvalidArgumentError, match=r"one of posix_shm \(backend cpu\), got cuda_ipc"):
            runtime.open_memory(foreign)


def test_lending_what_this_machine_has_not_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="kind must be one of posix_shm, cuda_ipc, got 'rdma'"):
        share_memory(64, kind="rdma")
    with pytest.raises(ConfigError):
        share_memory(64, kind=MemoryKind.CUDA_IPC, device="cuda:0")


def test_a_killed_lender_leaves_nothing() -> None:
    """Who closes its memory removes the name; where nobody has opened it, the next start of a service does."""
    for opens in (True, False):
        lender = subprocess.Popen(
            [sys.executable, "-c", _LENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert lender.stdin is not None
        assert lender.stdout is not None
        name = lender.stdout.readline().strip()
        assert name not in remove_unowned()
        handle = MemoryHandle(kind="posix_shm", payload=name.encode(), offset=0, num_bytes=4096)
        opened = HostMemory.open(handle) if opens else None
        lender.kill()
        lender.wait(10)
        lender.stdin.close()
        lender.stdout.close()
        if opened is not None:
            assert opened.tensor(64, (4,), torch.float32).tolist() == [1.0, 2.0, 3.0, 4.0]
            opened.close()
        else:
            assert name in remove_unowned()
        assert not os.path.exists(f"/dev/shm/{name}")
