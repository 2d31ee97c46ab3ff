"""Memory of callers without a GPU: the CUDA driver's few calls are played by host memory of this process."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megamoe.backends.hopper import driver, memory, pinned
from megamoe.errors import ConfigError, HeapError, InternalError, InvalidArgumentError
from megamoe.memory import HostMemory, MemoryHandle, MemoryKind

GPU = torch.device("cuda", 1)
UUID = "GPU-of-this-test"
EVENT = b"e" * 64


class Event:
    """An event of another process. done: whether its GPU has come there."""

    def __init__(self) -> None:
        self.done = True

    def query(self) -> bool:
        return self.done


class Driver:
    """Functions of libcuda, over allocations at real addresses. `opens` and `closes` count the driver's work."""

    def __init__(self) -> None:
        self.allocations: dict[bytes, torch.Tensor] = {}
        self.contexts = 0
        self.opens = 0
        self.closed: list[int] = []
        self.launched: list[tuple[int, int]] = []
        self.events: dict[bytes, Event] = {EVENT: Event()}

    def allocate(self, name: bytes, num_bytes: int) -> torch.Tensor:
        self.allocations[name.ljust(64, b"\1")] = torch.zeros(num_bytes, dtype=torch.uint8)
        return self.allocations[name.ljust(64, b"\1")]

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = ordinal
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        assert device.value == GPU.index
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        self.contexts += 1
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        self.contexts -= 1
        return 0

    def cuGetErrorName(self, code: int, name: Any) -> int:
        name._obj.value = {1: b"CUDA_ERROR_INVALID_VALUE", 400: b"CUDA_ERROR_INVALID_HANDLE"}[code]
        return 0

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, address: Any) -> int:
        assert self.contexts == 1
        for allocation in self.allocations.values():
            if 0 <= address.value - allocation.data_ptr() < allocation.nbytes:
                base._obj.value, size._obj.value = allocation.data_ptr(), allocation.nbytes
                return 0
        return 1

    def cuIpcGetMemHandle(self, handle: Any, base: Any) -> int:
        for name, allocation in self.allocations.items():
            if allocation.data_ptr() == base.value:
                ctypes.memmove(ctypes.addressof(handle._obj), name, 64)
                return 0
        return 1

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: Any) -> int:
        assert self.contexts == 1
        assert flags.value == 1
        found = self.allocations.get(bytes(handle))
        if found is None:
            return 400
        self.opens += 1
        address._obj.value = found.data_ptr()
        return 0

    def cuGraphLaunch(self, graph: Any, stream: Any) -> int:
        assert self.contexts == 1
        if not graph.value:
            return 1
        self.launched.append((graph.value, stream.value))
        return 0

    def cuIpcCloseMemHandle(self, address: Any) -> int:
        self.closed.append(address.value)
        return 0


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    fake = Driver()
    monkeypatch.setattr(driver, "_library", lambda: fake)
    monkeypatch.setattr(memory, "uuid_of", lambda device: UUID)
    monkeypatch.setattr(memory, "tensor_at", tensor_at)
    monkeypatch.setattr(memory, "open_event", lambda handle, device: fake.events[bytes(handle)])
    monkeypatch.setattr(memory, "_lent", set())
    driver.context_of.cache_clear()
    yield fake
    driver.context_of.cache_clear()


def tensor_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=torch.uint8)


def handle_of(name: bytes, *, offset: int = 0, num_bytes: int = 64, device: str = UUID) -> MemoryHandle:
    return MemoryHandle(
        kind=MemoryKind.CUDA_IPC,
        payload=name.ljust(64, b"\1") + EVENT,
        offset=offset,
        num_bytes=num_bytes,
        device=device,
    )


def test_an_allocation_is_exported_with_the_offset_in_it(played: Driver) -> None:
    """Allocators of callers cut tensors out of larger allocations, and only those have handles."""
    whole = played.allocate(b"a", 4096)
    assert driver.export_allocation(whole.data_ptr() + 512, GPU.index) == (b"a".ljust(64, b"\1"), 512)
    assert played.contexts == 0


def lent(whole: torch.Tensor) -> Any:
    """A tensor that counts as one of the GPU."""
    return SimpleNamespace(
        is_cuda=True, is_contiguous=lambda: True, data_ptr=whole.data_ptr, nbytes=64, device=GPU
    )


def test_memory_without_a_handle_is_said_by_the_drivers_name(played: Driver) -> None:
    elsewhere = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(ConfigError, match="from cudaMalloc .*cuMemGetAddressRange_v2 .*INVALID_VALUE"):
        memory.export_tensor(lent(elsewhere))
    assert played.contexts == 0


def test_a_graph_is_launched_in_the_context_of_its_gpu(played: Driver) -> None:
    launch = driver.graph_launcher(11, 22, GPU.index)
    launch()
    launch()
    assert played.launched == [(11, 22)] * 2
    with pytest.raises(InternalError, match="result of cuGraphLaunch must be CUDA_SUCCESS, got CUDA_ERROR"):
        driver.graph_launcher(0, 22, GPU.index)()
    assert played.contexts == 0


def test_rows_of_another_process_are_read_and_written_in_place(played: Driver) -> None:
    theirs = played.allocate(b"a", 4096)
    opened = memory.DeviceMemory.open(handle_of(b"a", offset=256, num_bytes=1024), GPU)
    theirs[256:264] = torch.tensor([1.0, 2.0, 3.0, 4.0]).bfloat16().view(torch.uint8)
    rows = opened.tensor(0, (2, 2), torch.bfloat16)
    assert rows.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    opened.tensor(16, (4,), torch.int32).fill_(7)
    assert theirs[272:288].view(torch.int32).tolist() == [7, 7, 7, 7]
    assert opened.tensor(0, (2, 2), torch.bfloat16) is rows
    for offset, shape in ((8, (2,)), (1008, (16,))):
        with pytest.raises(InvalidArgumentError):
            opened.tensor(offset, shape, torch.bfloat16)
    opened.close()


def test_the_driver_opens_an_allocation_once_and_closes_it_with_its_last_user(played: Driver) -> None:
    theirs = played.allocate(b"a", 4096)
    first = memory.DeviceMemory.open(handle_of(b"a"), GPU)
    second = memory.DeviceMemory.open(handle_of(b"a", offset=64), GPU)
    assert played.opens == 1
    first.close()
    first.close()
    assert played.closed == []
    second.close()
    assert played.closed == [theirs.data_ptr()]
    memory.DeviceMemory.open(handle_of(b"a"), GPU).close()
    assert played.opens == 2


def test_what_cannot_be_opened_is_refused_by_name(played: Driver) -> None:
    played.allocate(b"a", 4096)
    with pytest.raises(InvalidArgumentError, match=r"memory.device must be GPU-of-this-test, got GPU-other"):
        memory.DeviceMemory.open(handle_of(b"a", device="GPU-other"), GPU)
    with pytest.raises(InvalidArgumentError, match=r"memory.payload .*CUDA_ERROR_INVALID_HANDLE"):
        memory.DeviceMemory.open(handle_of(b"gone"), GPU)
    short = MemoryHandle(kind=MemoryKind.CUDA_IPC, payload=b"abc", offset=0, num_bytes=1, device=UUID)
    with pytest.raises(InvalidArgumentError, match=r"memory.payload must be 128 bytes, got 3"):
        memory.DeviceMemory.open(short, GPU)
    assert played.contexts == 0


@pytest.mark.parametrize(
    ("offset", "num_bytes"), [(0, 4097), (4096, 1), (4080, 17), (1 << 61, 64), (16, 1 << 61)]
)
def test_more_than_the_owner_has_is_refused_and_closed_again(
    played: Driver, offset: int, num_bytes: int
) -> None:
    """Kernels would read and write past the allocation: a fault there ends the GPU's context, and so the rank."""
    theirs = played.allocate(b"a", 4096)
    memory.DeviceMemory.open(handle_of(b"a", offset=16, num_bytes=4080), GPU).close()
    said = rf"memory must be inside the 4096 bytes of its allocation, got bytes up to {offset + num_bytes}"
    with pytest.raises(InvalidArgumentError, match=said):
        memory.DeviceMemory.open(handle_of(b"a", offset=offset, num_bytes=num_bytes), GPU)
    assert played.closed == [theirs.data_ptr()] * 2
    assert played.contexts == 0


def test_a_process_does_not_open_what_it_lends(played: Driver) -> None:
    whole = played.allocate(b"a", 4096)
    handle = memory.export_tensor(lent(whole))
    assert (handle.offset, handle.num_bytes, handle.device) == (0, 64, UUID)
    with pytest.raises(InvalidArgumentError, match="of another process, got of this one"):
        memory.DeviceMemory.open(replace(handle, payload=handle.payload + EVENT), GPU)


def test_memory_knows_its_addresses_and_whether_its_owners_gpu_has_come(played: Driver) -> None:
    start = played.allocate(b"a", 4096).data_ptr()
    opened = memory.DeviceMemory.open(handle_of(b"a", offset=256, num_bytes=1024), GPU)
    assert [opened.holds(start + at) for at in (255, 256, 1279, 1280)] == [False, True, True, False]
    played.events[EVENT].done = False
    assert not opened.is_published()
    played.events[EVENT].done = True
    assert opened.is_published()
    assert not opened.is_closed
    opened.close()
    assert opened.is_closed
    assert not opened.holds(start + 256)


def test_an_idle_stream_has_nothing_to_publish(played: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    played.allocate(b"a", 4096)
    opened = memory.DeviceMemory.open(handle_of(b"a"), GPU)
    marked: list[object] = []
    monkeypatch.setattr(opened, "_published", SimpleNamespace(record=marked.append))
    for idle in (True, False):
        stream = SimpleNamespace(query=lambda idle=idle: idle)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, stream=stream: stream)
        opened.publish()
        assert marked == ([] if idle else [stream])


def test_only_device_memory_is_lent() -> None:
    with pytest.raises(InvalidArgumentError, match="lent tensor must be contiguous and on a GPU"):
        memory.export_tensor(torch.zeros(4))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device"):
            memory.share_memory(64, "")


class Cudart:
    """torch.cuda.cudart(), as far as it pins. Refuses memory of `refused` bytes."""

    def __init__(self, refused: int = -1) -> None:
        self.pinned: dict[int, int] = {}
        self.refused = refused

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if num_bytes == self.refused:
            return 2
        self.pinned[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


def test_shared_memory_of_the_host_is_pinned_while_it_is_open(
    played: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    theirs = HostMemory.share(8192)
    pins = pinned.Pins()
    opened = pinned.PinnedMemory(HostMemory.open(theirs.handle), GPU, pins)
    assert list(cudart.pinned.values()) == [8192]
    theirs.tensor(64, (3,), torch.int32).copy_(torch.tensor([1, 2, 3]))
    assert opened.tensor(64, (3,), torch.int32).tolist() == [1, 2, 3]
    view = opened.tensor(64, (3,), torch.int32)
    assert pins.hold(view)
    assert not pins.hold(theirs.tensor(64, (3,), torch.int32)), "another mapping is not pinned"
    opened.close()
    opened.close()
    assert cudart.pinned == {}
    assert not pins.hold(view), "other memory may come to lie there"
    theirs.close()


def test_memory_that_cannot_be_pinned_is_refused_with_its_size(
    played: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the runtime's error is taken from it: else the next kernel of torch on this thread would be blamed."""
    taken: list[int] = []
    runtime = SimpleNamespace(cudaGetLastError=lambda: taken.append(2))
    monkeypatch.setattr(driver, "_runtime", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cudart(refused=4096))
    with pytest.raises(HeapError, match="4096 bytes of host memory must be possible to pin, got error 2"):
        pinned.Pin(torch.zeros(4096, dtype=torch.uint8), GPU, pinned.Pins())
    assert taken == [2]
    theirs = HostMemory.share(4096)
    with pytest.raises(HeapError):
        pinned.PinnedMemory(HostMemory.open(theirs.handle), GPU, pinned.Pins())
    theirs.close()
