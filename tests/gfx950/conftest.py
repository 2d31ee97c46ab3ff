"""One torch thread for these tests: ranks are emulated on one core, and waiting threads would take the others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Small tensors gain nothing from more threads, and on a busy machine their barriers spin for most of a test."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
