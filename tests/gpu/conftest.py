"""Tests that need a GPU: collected with `--backend hopper` only (`make gpu-tests`)."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What needs the other package's files runs where `--triton-kernels` names their folder."""
    if config.option.triton_kernels is None:
        without = [item for item in items if item.get_closest_marker("needs_triton_kernels")]
        config.hook.pytest_deselected(items=without)
        items[:] = [item for item in items if item not in without]
