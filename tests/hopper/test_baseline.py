"""The baseline is the same layer: its three parts, with the exchange done by hand, against the plain reference."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path as FilePath
from typing import Any

import pytest
import torch

from megamoe import MoeBatch, MoeShape, random_layer_weights, shard
from megamoe.backends.hopper.baseline.grouped_mm import GroupedMm
from megamoe.backends.hopper.baseline.mxfp4 import check_package, find_package
from megamoe.backends.hopper.baseline.ranks import next_answer
from megamoe.backends.hopper.baseline.routes import routes_of
from megamoe.backends.hopper.bench.timing import BaselineTiming
from megamoe.errors import ConfigError, PeerTimeoutError
from megamoe.mx import dequantize_mxfp4
from megamoe.reference import exact_moe, relative_l2
from megamoe.routing import route

SHAPE = MoeShape(hidden=128, intermediate=64, num_experts=8, num_topk=2, num_ranks=2, swiglu_limit=10.0)


@pytest.mark.parametrize("distribution", ["uniform", "one_rank", "zipf"])
@pytest.mark.parametrize("counts", [(7, 12), (0, 9)])
def test_baseline_is_the_layer(distribution: str, counts: tuple[int, int]) -> None:
    everyone = route(SHAPE, distribution, list(counts), seed=4)
    weights = random_layer_weights(SHAPE, seed=6)
    inputs = [
        torch.randn(n, SHAPE.hidden, generator=torch.Generator().manual_seed(n)).bfloat16() for n in counts
    ]
    layers, routes = [], []
    for rank in range(2):
        own = shard(weights, SHAPE, rank).as_bytes()
        w13 = dequantize_mxfp4(own.w13_codes, own.w13_scales).bfloat16()
        layers.append(GroupedMm(SHAPE, w13, dequantize_mxfp4(own.w2_codes, own.w2_scales).bfloat16()))
        routes.append(routes_of(SHAPE, everyone, rank, torch.device("cpu")))
        assert sum(routes[rank].splits) == 2 * counts[rank]
    sent = [
        torch.split(layer.outgoing(x, one), one.splits)
        for layer, x, one in zip(layers, inputs, routes, strict=True)
    ]
    answers = [
        torch.split(layers[rank].experts(torch.cat([part[rank] for part in sent]), routes[rank]), received)
        for rank, received in enumerate(one.received_splits for one in routes)
    ]
    for rank, (ids, topk_weights) in enumerate(everyone):
        got = layers[rank].combine(torch.cat([part[rank] for part in answers]), routes[rank])
        want = exact_moe(MoeBatch.of(SHAPE, inputs[rank], ids, topk_weights), weights, SHAPE)
        assert got.shape == (counts[rank], SHAPE.hidden)
        if counts[rank]:
            assert relative_l2(got, want) < 2e-2


def test_a_rank_without_rows_gives_none() -> None:
    empty = torch.empty(0, SHAPE.hidden).bfloat16()
    routes = routes_of(SHAPE, route(SHAPE, "one_rank", [3, 3], seed=4), 1, torch.device("cpu"))
    assert sum(routes.received_splits) == 0
    layer = GroupedMm(SHAPE, torch.zeros(4, 128, 128).bfloat16(), torch.zeros(4, 128, 64).bfloat16())
    assert layer.experts(empty, routes).shape == (0, SHAPE.hidden)


class Process:
    """A rank: exit status, None while it runs. Its sentinel is ready once it has ended."""

    def __init__(self, status: int | None) -> None:
        self.sentinel, self._end = os.pipe()
        self.exitcode: int | None = None
        self._status = status
        if status is not None:
            os.close(self._end)

    def join(self, timeout_s: float) -> None:
        self.exitcode = self._status

    def close(self) -> None:
        os.close(self.sentinel)
        if self._status is None:
            os.close(self._end)


@pytest.mark.parametrize(
    ("statuses", "hung_up", "said", "missing"),
    [
        ([None, 1], False, r"ranks \[1\] ended early", (1,)),
        ([None, 0], False, r"ranks \[0, 1\] have no time to tell after 0.05 s", (0, 1)),
        ([None, None], True, r"ranks \[0\] ended early", (0,)),
        ([1, 1], True, r"ranks \[0, 1\] ended early", (0, 1)),
    ],
)
def test_ranks_that_end_early_are_named_at_once(
    statuses: list[int | None], hung_up: bool, said: str, missing: tuple[int, ...]
) -> None:
    """Rank 0 tells the times; while it waits for one that has ended, it says nothing."""
    processes: Any = [Process(status) for status in statuses]
    ours, theirs = multiprocessing.Pipe(duplex=False)
    timing = BaselineTiming("grouped_mm", "uniform", 1, 2.0)
    theirs.send(timing)
    assert next_answer(ours, processes, "grouped_mm") == timing
    if hung_up:
        theirs.close()
    limit_s = 60.0 if "early" in said else 0.05
    with pytest.raises(PeerTimeoutError, match=f"grouped_mm: {said}") as raised:
        next_answer(ours, processes, "grouped_mm", limit_s)
    assert raised.value.missing_ranks == missing
    for process in processes:
        process.close()
    ours.close()
    theirs.close()


def test_the_other_package_is_found_by_either_folder_and_refused_by_name(tmp_path: FilePath) -> None:
    package = tmp_path / "triton_kernels"
    for folder in (tmp_path, package):
        with pytest.raises(
            ConfigError, match="triton_kernels must be a folder with the package triton_kernels"
        ):
            find_package(folder)
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "matmul.py").write_text("from triton_kernels import something_that_went\n")
    assert find_package(tmp_path) == find_package(package) == tmp_path.absolute()
    with pytest.raises(
        ConfigError, match="triton_kernels must be files that fit the installed Triton, got cannot"
    ):
        check_package(tmp_path)
