"""A rank's bindings and its ends, without a GPU: what is refused changes nothing, what fails leaves nothing open."""

from __future__ import annotations

import os
import uuid
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megamoe import Deployment, MoeShape, plan_bundle, random_layer_weights
from megamoe.backends import hopper
from megamoe.backends.hopper import backend as module
from megamoe.backends.hopper import buffers, group
from megamoe.backends.hopper.backend import HopperBackend
from megamoe.errors import BindingError, ConfigError, HeapError
from megamoe.layout import plan_layout

SHAPE = MoeShape(hidden=96, intermediate=64, num_experts=4, num_topk=2, num_ranks=1, num_layers=2)
BUNDLE = plan_bundle(Deployment(shape=SHAPE, backend="hopper", max_tokens_per_rank=16))
WEIGHTS = random_layer_weights(SHAPE, seed=1)
CPU = torch.device("cpu")


class Stream:
    """broken: the device has failed, and says so whenever it is waited for."""

    broken = False

    def current(self) -> nullcontext[None]:
        return nullcontext()

    def synchronize(self) -> None:
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


class Pin:
    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


class Graphs:
    def __init__(self) -> None:
        self.forgotten: list[int] = []

    def forget(self, slot_idx: int) -> None:
        self.forgotten.append(slot_idx)

    def clear(self) -> None:
        self.forgotten = []


@pytest.fixture
def backend() -> HopperBackend:
    """Slot 0 is bound; its parts that need a GPU are played."""
    made: Any = object.__new__(HopperBackend)
    made.device, made.rank, made.bundle = CPU, 0, BUNDLE
    made.stream, made.graphs, made.kernels = Stream(), Graphs(), None
    made._sub_steps = SimpleNamespace(under_way=False)
    made._layers = [None, None]
    made._group = group.DeviceGroup("megamoe-test", {})
    made._pins, made._closed = {Pin(), Pin()}, False
    made.bind(0, WEIGHTS)
    made.graphs.forgotten = []
    backend: HopperBackend = made
    return backend


def bound(backend: HopperBackend) -> tuple[object, ...]:
    graphs: Any = backend.graphs
    return (*backend._layers, *graphs.forgotten)


def test_binding_anew_is_another_version_without_the_graphs_of_the_old(backend: HopperBackend) -> None:
    old, _ = bound(backend)
    seen: list[object] = []
    backend.bind(0, WEIGHTS, seen.append)
    layer, _, forgotten = bound(backend)
    assert seen
    assert (layer.version, old.version, forgotten) == (1, 0, 0)
    backend.bind_identity(1)
    assert bound(backend)[1].w13 is None


def test_weights_that_do_not_fit_the_device_are_refused_and_the_old_ones_stay(
    backend: HopperBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = bound(backend)

    def full(codes: torch.Tensor, scales: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(buffers, "pack_w2", full)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    num_bytes = sum(tensor.nbytes for tensor in WEIGHTS.tensors().values())
    wanted = f"free device memory for weights of slot 0 must be at least {num_bytes} bytes, got 1000"
    with pytest.raises(BindingError, match=wanted):
        backend.bind(0, WEIGHTS)
    assert bound(backend) == before


def test_what_is_refused_changes_nothing(backend: HopperBackend) -> None:
    before = bound(backend)

    def refuse(expert_rows: object) -> None:
        raise BindingError("expert 0 differs")

    with pytest.raises(BindingError, match="expert 0 differs"):
        backend.bind(0, WEIGHTS, refuse)
    with pytest.raises(BindingError, match="slot_idx must be an int from 0 to 1, got 2"):
        backend.bind(2, WEIGHTS)
    sub_steps: Any = backend._sub_steps
    sub_steps.under_way = True
    for bind in (lambda: backend.bind(0, WEIGHTS), lambda: backend.bind_identity(0)):
        with pytest.raises(BindingError, match="between sub-steps only"):
            bind()
    assert bound(backend) == before


@pytest.mark.parametrize("broken", [False, True])
def test_close_gives_everything_back_whatever_the_device_says(backend: HopperBackend, broken: bool) -> None:
    pins: Any = list(backend._pins)
    stream: Any = backend.stream
    stream.broken = broken
    group._own["megamoe-test", 0] = torch.zeros(1)
    with pytest.raises(RuntimeError, match="illegal memory access") if broken else nullcontext():
        backend.close()
    backend.close()
    assert [pin.closed for pin in pins] == [1, 1]
    assert ("megamoe-test", 0) not in group._own


def test_a_rank_that_fails_after_it_has_joined_leaves_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = plan_layout(BUNDLE)

    def unreachable(heaps: object, device: torch.device) -> None:
        raise ConfigError("peer access must be possible")

    played = {
        "check_gpu": lambda num_ranks: None,
        "check_triton": lambda: None,
        "allocate_heap": lambda *_: torch.zeros(layout.num_bytes, dtype=torch.uint8),
        "RankStream": lambda device: Stream(),
        "RankBuffers": lambda *_, **__: SimpleNamespace(bases=torch.zeros(1, dtype=torch.int64)),
        "Staging": lambda *_: None,
        "Kernels": lambda *_: SimpleNamespace(warm_up=lambda *_: None),
        "reach_peers": unreachable,
    }
    for name, stand_in in played.items():
        monkeypatch.setattr(module, name, stand_in)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    name = f"megamoe-test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    with pytest.raises(ConfigError, match="peer access"):
        HopperBackend(BUNDLE, rank=0, group_name=name, num_slots=1, timeout_s=5.0)
    assert (name, 0) not in group._own


def test_a_heap_that_does_not_fit_is_refused_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", full)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    layout = plan_layout(BUNDLE)
    wanted = f"free device memory for the symmetric heap must be at least {layout.num_bytes} bytes, got 1000"
    with pytest.raises(HeapError, match=wanted):
        buffers.allocate_heap(layout, CPU)


def test_a_gpu_too_full_for_a_context_is_refused_in_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then torch has no allocator yet to say so, and the driver no answer."""

    def fail(why: str) -> Any:
        def full(*_: object, **__: object) -> None:
            raise torch.AcceleratorError(f"CUDA error: {why}")

        return full

    monkeypatch.setattr(torch, "zeros", fail("out of memory"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", fail("out of memory"))
    with pytest.raises(HeapError, match="at least .* bytes, got too little for a context"):
        buffers.allocate_heap(plan_layout(BUNDLE), CPU)
    monkeypatch.setattr(torch, "zeros", fail("an illegal memory access was encountered"))
    with pytest.raises(torch.AcceleratorError, match="illegal"):
        buffers.allocate_heap(plan_layout(BUNDLE), CPU)


def test_gpus_of_another_kind_are_refused_where_ranks_would_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: ((9, 0), (8, 0))[number])
    hopper.check_gpu(1)
    for num_ranks in (2, 8, None):
        with pytest.raises(ConfigError, match=r"capability of GPU 1 must be 9.0 .*, got 8.0"):
            hopper.check_gpu(num_ranks)
