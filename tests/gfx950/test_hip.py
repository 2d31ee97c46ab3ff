"""What the HIP device hands to the HIP runtime and to MORI, with both replaced: no MI355X is needed to see it."""

from __future__ import annotations

import ctypes
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from megamoe.backends import diagnose
from megamoe.backends.gfx950.build import KernelSpec, load_or_compile
from megamoe.backends.gfx950.device import hip, machine
from megamoe.bundle import Deployment, plan_bundle
from megamoe.errors import ConfigError, InternalError, PeerTimeoutError
from megamoe.shape import preset
from tests.ranks import Rank, run_ranks

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


def fake_rocm(
    monkeypatch: pytest.MonkeyPatch,
    *,
    arch: str = "gfx950:sramecc+",
    units: int = 256,
    gpus: int = 2,
    peers: bool = True,
    free: int = 1 << 40,
    far: int = -1,
) -> list[str]:
    """torch as a ROCm build, MORI with two ranks; the list gets the calls in order."""
    calls: list[str] = []
    properties = SimpleNamespace(gcnArchName=arch, multi_processor_count=units)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    for name, value in {
        "is_available": lambda: True, "current_device": lambda: 0, "device_count": lambda: gpus,
        "synchronize": lambda device=None: calls.append("synchronize"),
        "get_device_properties": lambda device: properties, "Stream": lambda device: SimpleNamespace(cuda_stream=77),
        "can_device_access_peer": lambda a, b: peers, "mem_get_info": lambda index: (free, 1 << 40),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    shmem: Any = ModuleType("mori.shmem")
    shmem.shmem_torch_process_group_init = lambda name: calls.append(f"init {name}")
    shmem.shmem_npes, shmem.shmem_mype = (lambda: 2), (lambda: 1)
    shmem.mori_shmem_create_tensor = lambda shape, dtype: torch.ones(shape, dtype=dtype)
    shmem.shmem_ptr_p2p = lambda pointer, me, peer: 0 if peer == far else 1000 * (peer + 1)
    shmem.shmem_barrier_all = lambda: calls.append("barrier")
    shmem.shmem_finalize = lambda: calls.append("finalize")
    package: Any = ModuleType("mori")
    package.shmem = shmem
    package.__spec__ = ModuleSpec("mori", None)
    monkeypatch.setitem(sys.modules, "mori", package)
    monkeypatch.setitem(sys.modules, "mori.shmem", shmem)
    monkeypatch.delenv("MORI_SHMEM_HEAP_SIZE", raising=False)
    monkeypatch.setattr(
        machine, "meet", lambda rank, num_ranks, name, timeout_s: calls.append(f"meet in {name}")
    )
    return calls


def join(num_ranks: int = 2) -> hip.HipDevice:
    return hip.join(rank=1, num_ranks=num_ranks, heap_bytes=4096, group_name="g", timeout_s=1.0)


def test_the_heap_is_cleared_before_the_group_meets(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_rocm(monkeypatch)
    device = join()
    assert calls == ["meet in g", f"init {machine.GROUP}", "synchronize", "barrier"]
    assert device.heap_addresses() == (1000, 2000)
    assert not device.heap().read(torch.uint8, (4096,)).any()
    assert (device.num_compute_units, device.num_ranks, device.rank) == (256, 2, 1)
    device.close()
    assert calls[-1] == "finalize"


REFUSALS: dict[str, tuple[dict[str, Any], int, str]] = {
    "arch": ({"arch": "gfx942"}, 2, r"architecture of the GPUs must be gfx950 .MI355X., got gfx942"),
    "units": ({"units": 64}, 2, "compute units of a GPU must be 256 in 8 XCDs, got 64"),
    "gpus": ({"gpus": 3}, 4, "GPUs that a rank sees must be 4, or 1 of its own, got 3"),
    "peers": ({"peers": False}, 2, r"GPUs without peer access must be none, got \(0, 1\), \(1, 0\)"),
    "memory": ({"free": 4095}, 2, "free memory of a GPU must be at least 4096 bytes, got 4095"),
    "rdma": ({"far": 0}, 2, r"RDMA only to ranks \[0\]"),
    "group": ({"gpus": 4}, 4, "the MORI group must be rank 1 of 4, got rank 1 of 2"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_work_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    settings, num_ranks, match = REFUSALS[name]
    fake_rocm(monkeypatch, **settings)
    with pytest.raises(ConfigError, match=match):
        join(num_ranks)


def test_all_that_is_missing_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_rocm(monkeypatch, arch="gfx942", units=304, gpus=8, free=1 << 33)
    monkeypatch.setitem(sys.modules, "mori", None)
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    found = diagnose(plan_bundle(Deployment(shape=preset("deepseek-v4-pro"), backend="gfx950")))
    missing = [one.what.split(" must be ")[0] for one in found if not one.ok]
    assert missing[:4] == [
        "architecture of the GPUs", "compute units of a GPU", "free memory of a GPU", "package amd-mori",
    ]  # fmt: skip
    assert "ROCm 7.0" in [one.what for one in found]


def test_without_rocm_the_one_thing_missing_is_rocm() -> None:
    found = diagnose(plan_bundle(Deployment(shape=preset("deepseek-v4-pro"), backend="gfx950")))
    (missing,) = [one.what for one in found if not one.ok]
    assert missing.startswith("backend gfx950 needs a ROCm build of torch and an MI355X (got: a CPU build")


def met(rank: Rank, num_devices: int) -> list[object]:
    """The device that a rank takes, and a sum over the group that MORI will find."""
    chosen: list[object] = []
    torch.cuda.device_count = lambda: num_devices
    torch.cuda.set_device = chosen.append
    machine.meet(rank.rank, rank.num_ranks, rank.group_name, 60.0)
    group: Any = getattr(distributed.distributed_c10d, "_resolve_process_group")(machine.GROUP)  # noqa: B009
    total = torch.tensor([10**rank.rank])
    distributed.all_reduce(total, group=group)
    machine.part()
    return [*chosen, int(total)]


@pytest.mark.e2e
@pytest.mark.parametrize("num_devices", [1, 2])
def test_ranks_meet_and_mori_finds_their_group(num_devices: int) -> None:
    assert run_ranks(2, met, num_devices, timeout_s=100) == [[0, 11], [num_devices - 1, 11]]


def missed(rank: Rank) -> str:
    if rank.rank == 1:
        return ""
    torch.cuda.set_device = lambda device: None
    try:
        machine.meet(0, 2, rank.group_name, 2.0)
    except PeerTimeoutError as error:
        return str(error)
    return "no error"


@pytest.mark.e2e
def test_a_rank_that_nobody_meets_gives_up() -> None:
    said = run_ranks(2, missed, timeout_s=100)[0]
    assert "did not all open within 2.0 s (rank 0)" in said


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
