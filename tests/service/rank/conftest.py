"""A simulated group and a caller group of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.service.simulation import Group, simulated_group
from tests.service.tier import RANKS, Tier


@pytest.fixture
def group(group_name: str) -> Iterator[Group]:
    with simulated_group(group_name, RANKS) as made:
        yield made


@pytest.fixture
def tier(group: Group) -> Tier:
    return Tier(group)
