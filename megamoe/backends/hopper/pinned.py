"""Host memory that a GPU reaches where it lies: pinned for as long as somebody asks, and known by address."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megamoe.backends.hopper import driver
from megamoe.errors import HeapError, must_be
from megamoe.memory import HostMemory


class Pins:
    """What one rank has pinned. Asking torch about a tensor costs 2 us, in every call and for each of its tensors."""

    def __init__(self) -> None:
        self._ranges: tuple[range, ...] = ()
        self.on_discard: Callable[[], None] = _nothing
        """Called when memory goes, so that nobody keeps what was found out about it."""

    def add(self, addresses: range) -> None:
        self._ranges = (*self._ranges, addresses)

    def discard(self, addresses: range) -> None:
        self._ranges = tuple(known for known in self._ranges if known is not addresses)
        self.on_discard()

    def hold(self, tensor: torch.Tensor) -> bool:
        """Whether a contiguous tensor lies in one of them: all of it does, as memory is pinned whole."""
        address = tensor.data_ptr()
        return any(address in addresses for addresses in self._ranges)


def _nothing() -> None:
    """Nobody wants to know."""


class PinnedMemory:
    """Shared memory of a caller on the host, registered so that kernels reach it. Implements OpenMemory."""

    def __init__(self, memory: HostMemory, device: torch.device, pins: Pins) -> None:
        """Raises HeapError, and closes the memory, when the driver cannot pin it."""
        self._memory = memory
        self._pin: Pin | None = None
        try:
            self._pin = Pin(memory.tensor(0, (memory.num_bytes,), torch.uint8), device, pins)
        except BaseException:
            memory.close()
            raise

    @property
    def num_bytes(self) -> int:
        return self._memory.num_bytes

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._memory.tensor(offset, shape, dtype)

    def close(self) -> None:
        if self._pin is not None:
            self._pin.close()
        self._memory.close()


class Pin:
    """Host memory that a GPU reaches at its own address, until `close`. From any thread."""

    def __init__(self, memory: torch.Tensor, device: torch.device, pins: Pins) -> None:
        """memory: contiguous, on the host. pins: told of it. Raises HeapError when the driver cannot pin it."""
        self._memory: torch.Tensor | None = None
        # A thread that never used CUDA would begin a context on the first GPU.
        self._context = driver.context_of(device.index)
        with self._context:
            code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if code:
            driver.forget_last_error()
            got = f"error {code} of cudaHostRegister"
            raise HeapError(must_be(f"{memory.nbytes} bytes of host memory", "possible to pin", got))
        self._memory = memory
        self._pins = pins
        self._addresses = range(memory.data_ptr(), memory.data_ptr() + memory.nbytes)
        pins.add(self._addresses)

    def close(self) -> None:
        """Safe to call twice. No kernel may use the memory any more."""
        memory, self._memory = self._memory, None
        if memory is not None:
            self._pins.discard(self._addresses)
            with self._context:
                code = int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))
            if code:
                driver.forget_last_error()
