"""Fixtures: names of shared memory that never outlive a test, and a served rank."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest

from megamoe import unlink_all
from tests.service.served_rank import served

__all__ = ["group_name", "served"]

_counter = itertools.count()


@pytest.fixture
def group_name() -> Iterator[str]:
    """A fresh prefix for the segments of one test; what the test left behind is removed and is an error."""
    name = f"megamoe-test-{os.getpid()}-{next(_counter)}"
    yield name
    left = unlink_all(name)
    assert not left, f"shared memory must be gone after a test, got {left}"
