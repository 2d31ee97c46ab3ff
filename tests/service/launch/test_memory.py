"""A service that does not fit this machine is refused before anything is allocated or started."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from megamoe import shm_free_bytes
from megamoe.errors import HeapError
from service.cli import doctor
from service.config import load_config
from service.launch import local_launcher, memory
from service.launch.supervisor import Supervisor


def test_what_fits_is_what_both_the_file_system_and_the_machine_have() -> None:
    assert 0 < memory.shm_left_bytes() <= shm_free_bytes()


def test_nothing_starts_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Filling /dev/shm page by page takes a minute, and the memory of whoever else lives on the machine."""

    def never(*_: object) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr(local_launcher.LocalLauncher, "launch", never)
    monkeypatch.setattr(memory, "shm_left_bytes", lambda: 30 << 30)
    huge = {"shape": "deepseek-v4-pro", "max_tokens_per_rank": 8192, "num_layers": 1}
    config = load_config(overrides={**huge, "launcher": "local", "port": 0, "http_port": 0}, env=False)
    before = set(Path("/dev/shm").iterdir())
    start = time.monotonic()
    need = sum(memory.shm_bytes(config).values())
    assert need > 30 << 30
    with pytest.raises(HeapError, match=f"free shared memory must be at least {need} bytes .*got {30 << 30}"):
        asyncio.run(Supervisor(config).run())
    assert time.monotonic() - start < 5
    assert not {path for path in set(Path("/dev/shm").iterdir()) - before if path.name.startswith("megamoe-")}


@pytest.mark.parametrize("backend", ["gfx950", "hopper"])
def test_heaps_and_weights_on_gpus_take_no_memory_of_the_host(backend: str) -> None:
    emulated = load_config(overrides={"profile": "emulated"}, env=False)
    real = load_config(overrides={"profile": "deepseek-v4-pro-ep8", "backend": backend}, env=False)
    cpu = load_config(overrides={"profile": "deepseek-v4-pro-ep8"}, env=False)
    assert memory.shm_bytes(emulated)["heaps"] > 0
    assert memory.shm_bytes(real)["heaps"] == 0
    assert memory.shm_bytes(real)["request rings"] > 0
    assert doctor.memory_bytes(real) < 40 << 30 < 700 << 30 < doctor.memory_bytes(cpu)
