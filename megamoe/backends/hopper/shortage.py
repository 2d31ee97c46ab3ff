"""Device memory that is short, as an error of ours: what for, how much is wanted, how much is free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megamoe.errors import HeapError, OperatorError, must_be


@contextmanager
def allocating(
    what: str, num_bytes: int, device: torch.device, error: type[OperatorError] = HeapError
) -> Iterator[None]:
    """In here torch allocates about num_bytes on a GPU. Raises `error` where its allocator finds no more memory, or the
    driver none for its own (a context takes half a gigabyte).

    Only the allocator knows: what the driver calls free leaves out the memory that torch keeps for such a moment.
    """
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError) as short:
        if "out of memory" not in str(short):
            raise
        raise error(
            must_be(f"free device memory for {what}", f"at least {num_bytes} bytes", _free(device))
        ) from short


def _free(device: torch.device) -> int | str:
    try:
        return torch.cuda.mem_get_info(device)[0]
    except torch.AcceleratorError:
        return "too little for a context"
