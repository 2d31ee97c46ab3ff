"""What the HIP device hands to the HIP runtime and to MORI, with both replaced: no MI355X is needed to see it."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megamoe.backends.gfx950.build import KernelSpec, load_or_compile
from megamoe.backends.gfx950.device import hip
from megamoe.errors import ConfigError, InternalError

CLOSE = KernelSpec.of("close", ABORT=1, NUM_RANKS=2)


class FakeHip:
    """Records launches as the runtime would see them."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.loaded: list[bytes] = []
        self.launches: list[tuple[Any, ...]] = []

    def hipModuleLoadData(self, module: Any, code: bytes) -> int:
        self.loaded.append(code)
        return self.status

    def hipModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        ctypes.cast(function, ctypes.POINTER(ctypes.c_void_p))[0] = 0x1234
        self.name = name
        return 0

    def hipModuleLaunchKernel(self, function: Any, *rest: Any) -> int:
        *sizes, stream, params, extra = rest
        assert (extra[0], extra[2], extra[4]) == (1, 2, 3)
        assert params is None
        size = ctypes.c_size_t.from_address(extra[3]).value
        self.launches.append((function.value, tuple(sizes), stream.value, ctypes.string_at(extra[1], size)))
        return 0


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> hip.HipStream:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(cuda_stream=77))
    return hip.HipStream(torch.device("cpu"))


def test_a_launch_is_a_packed_argument_buffer(monkeypatch: pytest.MonkeyPatch, stream: hip.HipStream) -> None:
    fake = FakeHip()
    monkeypatch.setattr(hip, "_hip", lambda: fake)
    code = load_or_compile(CLOSE)
    for _ in range(2):
        stream.launch(code, 3, 64, [2**40, 2**41, 2**42, 5])
    assert fake.loaded == [code.code]
    assert fake.name == code.kernel.name.encode()
    (function, sizes, handle, packed), again = fake.launches
    assert (function, sizes, handle) == (0x1234, (3, 1, 1, 64, 1, 1, 0), 77)
    assert packed == code.kernel.pack([2**40, 2**41, 2**42, 5], (3, 1, 1), (64, 1, 1))
    assert again[3] == packed


def test_a_hip_error_names_the_kernel(monkeypatch: pytest.MonkeyPatch, stream: hip.HipStream) -> None:
    monkeypatch.setattr(hip, "_hip", lambda: FakeHip(status=209))
    with pytest.raises(InternalError, match="loading close must succeed, got HIP error 209"):
        stream.launch(load_or_compile(CLOSE), 1, 64, [0, 0, 0, 0])


def fake_rocm(monkeypatch: pytest.MonkeyPatch, *, arch: str = "gfx950:sramecc+", far: int = -1) -> list[str]:
    """torch as a ROCm build on one device, MORI with two ranks; the list gets the calls in order."""
    calls: list[str] = []
    properties = SimpleNamespace(gcnArchName=arch, multi_processor_count=256)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(cuda_stream=77))
    shmem: Any = ModuleType("mori.shmem")
    shmem.shmem_torch_process_group_init = lambda name: calls.append(f"init {name}")
    shmem.shmem_npes, shmem.shmem_mype = (lambda: 2), (lambda: 1)
    shmem.mori_shmem_create_tensor = lambda shape, dtype: torch.ones(shape, dtype=dtype)
    shmem.shmem_ptr_p2p = lambda pointer, me, peer: 0 if peer == far else 1000 * (peer + 1)
    shmem.shmem_barrier_all = lambda: calls.append("barrier")
    shmem.shmem_finalize = lambda: calls.append("finalize")
    package: Any = ModuleType("mori")
    package.shmem = shmem
    monkeypatch.setitem(sys.modules, "mori", package)
    monkeypatch.setitem(sys.modules, "mori.shmem", shmem)
    monkeypatch.delenv("MORI_SHMEM_HEAP_SIZE", raising=False)
    return calls


def test_the_heap_is_cleared_before_the_group_meets(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_rocm(monkeypatch)
    device = hip.join(rank=1, num_ranks=2, heap_bytes=4096)
    assert calls == ["init default", "synchronize", "barrier"]
    assert device.heap_addresses() == (1000, 2000)
    assert not device.heap().read(torch.uint8, (4096,)).any()
    assert (device.num_compute_units, device.num_ranks, device.rank) == (256, 2, 1)
    device.close()
    assert calls[-1] == "finalize"


@pytest.mark.parametrize(
    ("settings", "ranks", "match"),
    [
        ({"arch": "gfx942"}, 2, "architecture of the device must be gfx950"),
        ({"far": 0}, 2, r"RDMA only to ranks \[0\]"),
        ({}, 4, "the MORI group must be rank 1 of 4, got rank 1 of 2"),
    ],
)
def test_what_cannot_work_is_refused(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], ranks: int, match: str
) -> None:
    fake_rocm(monkeypatch, **settings)
    with pytest.raises(ConfigError, match=match):
        hip.join(rank=1, num_ranks=ranks, heap_bytes=4096)


def test_memory_copies_bytes_both_ways() -> None:
    memory = hip.HipMemory(torch.zeros(64, dtype=torch.uint8))
    memory.write(torch.arange(4, dtype=torch.int64), 16)
    assert memory.read(torch.int64, (2, 2), 16).tolist() == [[0, 1], [2, 3]]
    out = torch.zeros(3, 2, dtype=torch.int64)
    memory.read_into(out)
    assert out.tolist() == [[0, 0], [0, 1], [2, 3]]
    memory.free()
    with pytest.raises(InternalError, match="after it was given back"):
        memory.read(torch.uint8, (1,))
