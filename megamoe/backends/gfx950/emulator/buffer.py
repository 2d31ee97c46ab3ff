"""Device memory as the host sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import DTypeLike, NDArray

if TYPE_CHECKING:
    from megamoe.backends.gfx950.emulator.device import DeviceGroup


class Buffer:
    """Device memory: `address` for kernels, `view` for the host. Bounds are exact; neighbours are 256 bytes away."""

    def __init__(self, name: str, rank: int, memory: NDArray[np.uint8], owner: DeviceGroup) -> None:
        self.name, self.rank, self.memory, self._owner = name, rank, memory, owner

    @property
    def address(self) -> int:
        """Address on the device."""
        return int(self.memory.ctypes.data)

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return int(self.memory.nbytes)

    def view(self, dtype: DTypeLike = np.uint8, shape: Sequence[int] | None = None) -> NDArray[np.generic]:
        """The bytes as an array; writes are seen by the device."""
        out: NDArray[np.generic] = self.memory.view(dtype)
        return out if shape is None else out.reshape(tuple(shape))

    def free(self) -> None:
        """Give the memory back; a kernel that still uses it faults."""
        self._owner.release(self)
