"""The registry of backends: what cannot open here is said before anything starts."""

from __future__ import annotations

import pytest
import torch

from megamoe import Deployment, backends, check_backend, plan_bundle, preset
from megamoe.backends import open_backend
from megamoe.errors import ConfigError

DEPLOYMENT = Deployment(shape=preset("demo"), max_tokens_per_rank=64)


def test_the_cpu_opens_everywhere() -> None:
    check_backend(plan_bundle(DEPLOYMENT))


@pytest.mark.parametrize(
    ("backend", "sentence"),
    [
        ("hopper", "backend hopper needs a CUDA build of torch and a GPU"),
        ("gfx950", "backend gfx950 needs a ROCm build"),
    ],
)
def test_a_backend_without_its_device_is_refused(
    backend: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=sentence):
        check_backend(plan_bundle(Deployment(shape=preset("demo"), max_tokens_per_rank=64, backend=backend)))


def test_a_package_that_is_missing_and_a_backend_without_a_door_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bundle = plan_bundle(DEPLOYMENT)
    for module, sentence in (
        (
            "megamoe_no_such_kernels",
            r"backend cpu needs the package megamoe_no_such_kernels: install megamoe\[cpu\]",
        ),
        ("json", "backend cpu has no kernels in this version"),
    ):
        monkeypatch.setitem(backends._MODULES, "cpu", module)
        with pytest.raises(ConfigError, match=sentence):
            check_backend(bundle)
        with pytest.raises(ConfigError, match=sentence):
            open_backend("cpu", bundle, rank=0, group_name="megamoe-none", num_slots=1, timeout_s=1.0)
