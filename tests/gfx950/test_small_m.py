"""small_m: what is its own, beside what test_backend asks of every path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from megamoe import mx
from megamoe.backends.gfx950 import backend, references
from megamoe.backends.gfx950.backend import Gfx950Backend
from megamoe.backends.gfx950.device.emulated import EmulatedStream
from megamoe.backends.gfx950.lockstep import Ranks, batches_of, emulated, layer_weights, shape_of
from megamoe.backends.gfx950.plan import LaunchPlan, inner_bytes, plan_launch
from megamoe.batch import MoeBatch
from megamoe.bundle import Path, RowFormat
from megamoe.errors import BindingError, ConfigError, IneligibleError, PeerTimeoutError
from megamoe.path import SubStep
from megamoe.reference import QUANTIZED_REL_L2, identity_moe, quantized_moe, relative_l2, tolerance
from megamoe.shape import MoeShape
from megamoe.weights import shard

UNEVEN = [1, 0, 7, 2, 5, 3, 0, 4]
AUTO = dict(combine_row_format=RowFormat.AUTO, auto_fp8_min_rows=40, auto_fp8_min_rows_of_expert=12)


def check(outs: list[torch.Tensor], wants: list[torch.Tensor]) -> None:
    got, want = torch.cat(outs), torch.cat(wants)
    assert torch.isfinite(got).all()
    assert relative_l2(got, want) <= tolerance(QUANTIZED_REL_L2, len(want))


def heavy_owners(batches: list[MoeBatch], shape: MoeShape, rows: int, rows_of_expert: int) -> list[bool]:
    """By the routing alone: which owners receive so many routed rows, or so many of one expert."""
    ids = torch.cat([batch.topk_ids.flatten() for batch in batches])
    counts = torch.bincount(ids[ids >= 0].long(), minlength=shape.num_experts).view(shape.num_ranks, -1)
    return [bool(mine.sum() >= rows or mine.max() >= rows_of_expert) for mine in counts]


@pytest.mark.parametrize("identity", [False, True])
@pytest.mark.parametrize("distribution", ["one_rank", "hot60", "uniform"])
def test_owners_choose_their_row_format(distribution: str, identity: bool) -> None:
    """Each by what it received; all ranks are told, and read both formats in one sum."""
    with Ranks(emulated(shape_of(), **AUTO), seed=8) as ranks:
        shape = ranks.shape
        weights = None if identity else ranks.bind()
        if identity:
            ranks.bind_identity()
        batches = batches_of(shape, UNEVEN, distribution, seed=3, exact=identity, no_expert_share=0.05)
        outs, reports = ranks.run(Path.SMALL_M, batches)
        heavy = heavy_owners(batches, shape, 40, 12)
        formats = tuple(RowFormat.FP8 if one else RowFormat.BF16 for one in heavy)
        assert {report.row_format_per_rank for report in reports} == {formats}
        if weights is None:
            for out, batch in zip(outs, batches, strict=True):
                assert torch.equal(out, identity_moe(batch, shape, formats))
        else:
            check(outs, [quantized_moe(batch, weights, shape, formats) for batch in batches])
        assert ranks.reports() == []
    assert any(heavy) == (distribution != "uniform")
    assert not all(heavy)


def test_many_tiles_of_one_expert_give_the_bits_of_compact() -> None:
    """A hot expert has several tiles; weights come through the caches, units of the same columns side by side."""
    with Ranks(emulated(shape_of(num_experts=64), auto_fp8_min_rows_of_expert=64), seed=2) as ranks:
        weights = ranks.bind()
        batches = batches_of(ranks.shape, [16, 9, 16, 12, 16, 16, 5, 16], "zipf", seed=5)
        outs, reports = ranks.run(Path.SMALL_M, batches)
        counts = [count for one in ranks.backends for count in one.launches.rows_per_expert()]
        assert max(counts) > 2 * plan_launch(ranks.shape, 16, 16).block_m
        compact, _ = ranks.run(Path.COMPACT, batches, epoch=1)
        assert torch.equal(torch.cat(outs), torch.cat(compact))
        check(outs, [quantized_moe(batch, weights, ranks.shape) for batch in batches])
        assert {one for report in reports for one in report.row_format_per_rank} == {RowFormat.BF16}
        assert ranks.reports() == []


@pytest.mark.parametrize("num_groups", [1, 2, 5, 11, 64])
def test_any_grid_that_is_resident_comes_to_its_end(num_groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few workgroups do the work of many, and none waits for one that is not there."""

    def plan(shape: MoeShape, max_rows: int, num_compute_units: int) -> LaunchPlan:
        return replace(plan_launch(shape, max_rows, num_compute_units), small_m_groups=num_groups)

    monkeypatch.setattr(backend, "plan_launch", plan)
    with Ranks(emulated(shape_of()), seed=num_groups, num_cus=32) as ranks:
        ranks.bind()
        batches = batches_of(ranks.shape, UNEVEN, "zipf", seed=1, no_expert_share=0.1)
        outs, _ = ranks.run(Path.SMALL_M, batches)
        compact, _ = ranks.run(Path.COMPACT, batches, epoch=1)
        assert torch.equal(torch.cat(outs), torch.cat(compact))
        assert ranks.reports() == []


def test_rows_that_come_quantized_need_no_kernel_of_their_own() -> None:
    with Ranks(emulated(shape_of()), seed=6) as ranks:
        ranks.bind()
        plain = batches_of(ranks.shape, [4, 0, 2, 2, 1, 1, 3, 2])
        batches = [
            MoeBatch.of(ranks.shape, codes, batch.topk_ids, batch.topk_weights, sf)
            for batch in plain
            for codes, sf in [mx.quantize_mxfp8(batch.hidden_states)]
        ]
        mixed = batches[:4] + plain[4:]
        outs, _ = ranks.run(Path.SMALL_M, mixed)
        again, _ = ranks.run(Path.SMALL_M, plain, epoch=1)
        assert torch.equal(torch.cat(outs), torch.cat(again))
        assert ranks.reports() == []


@pytest.mark.parametrize(("hidden", "intermediate"), [(32, 32), (544, 96), (1152, 704)])
def test_shapes_that_fill_no_tile(hidden: int, intermediate: int) -> None:
    with Ranks(emulated(shape_of(hidden, intermediate, num_experts=16, num_topk=3)), seed=7) as ranks:
        weights = ranks.bind()
        batches = batches_of(ranks.shape, UNEVEN, no_expert_share=0.1)
        outs, _ = ranks.run(Path.SMALL_M, batches)
        check(outs, [quantized_moe(batch, weights, ranks.shape) for batch in batches])
        assert ranks.reports() == []


def test_memory_after_the_launch() -> None:
    """Payload, words beside rows, lists, intermediate rows and outputs: those of the stages' references."""
    shape = shape_of(544, 96, num_experts=16, num_topk=4)
    with Ranks(emulated(shape, **AUTO), seed=9) as ranks:
        weights = ranks.bind()
        layout = ranks.backends[0].launches.layout
        batches = batches_of(shape, UNEVEN, "zipf", seed=4, no_expert_share=0.2, duplicate_share=0.2)
        outs, reports = ranks.run(Path.SMALL_M, batches)
        rows = [(b.hidden_states, b.topk_ids, b.topk_weights) for b in batches]
        pairs = [references.quantize(layout, *one) for one in rows]
        words = [words for _, words in pairs]
        shift = plan_launch(shape, max(UNEVEN), 16).tile_shift
        used = 1 + 2 * shape.num_topk
        heavy = []
        for rank, one in enumerate(ranks.backends):
            launches = one.launches
            got_words = launches.meta.read(torch.int32, words[rank].shape)
            assert torch.equal(got_words[:, :used], words[rank][:, :used])
            want = references.dispatch(layout, rank, words, capacity=16, tile_shift=shift)
            heavy.append(references.is_heavy(want, 40, 12))
            assert torch.equal(launches.experts.read(torch.int32, want.experts.shape), want.experts)
            assert torch.equal(launches.row_table.read(torch.int32, want.row_table.shape), want.row_table)
            at = layout.region("payload_rows0").offset
            payload = launches.heap.read(torch.uint8, (layout.max_rows_received, layout.row_bytes), at)
            for place, result, *_ in want.row_table.tolist():
                src, token = result >> 20, (result & (1 << 20) - 1) // shape.num_topk
                assert torch.equal(payload[place], pairs[src][0][token])
            inner = launches.inner.read(torch.uint8, (len(want.row_table), inner_bytes(shape.intermediate)))
            first = rank * shape.num_experts_per_rank
            mine = weights.experts(first, first + shape.num_experts_per_rank)
            exact = references.gemm1(payload, want, mine, shape.hidden, shape.swiglu_limit)
            assert relative_l2(references.decode_rows(inner, shape.intermediate), exact) <= 0.04
        formats = tuple(RowFormat.FP8 if one else RowFormat.BF16 for one in heavy)
        assert {report.row_format_per_rank for report in reports} == {formats}
        assert set(heavy) == {False, True}
        check(outs, references.small_m(layout, rows, weights, heavy, capacity=16, tile_shift=shift))


def test_bytes_sent_are_those_that_left() -> None:
    """What the report says went to peers, against what the emulator saw."""
    with Ranks(emulated(shape_of(), **AUTO), checked=False) as ranks:
        ranks.bind()
        batches = batches_of(ranks.shape, UNEVEN, "one_rank", seed=2, no_expert_share=0.2)
        _, reports = ranks.run(Path.SMALL_M, batches)
        for one, report in zip(ranks.backends, reports, strict=True):
            stream = one.device.stream
            assert isinstance(stream, EmulatedStream)
            (handle,) = stream.take_handles()
            assert handle.traffic.remote_bytes[1] == report.counters.bytes_sent


def sub_step(counts: tuple[int, ...], capacity: int = 16) -> SubStep:
    return SubStep.whole(Path.SMALL_M, capacity, counts)


@pytest.mark.parametrize(
    ("counts", "capacity", "sentence"),
    [
        ((), 16, r"rows of small_m must be 8 agreed counts of at most 16 rows, got \(\)"),
        ((3,), 16, r"must be 8 agreed counts of at most 16 rows, got \(3,\)"),
        ((1, 17, 0, 0, 0, 0, 0, 0), 16, "must be 8 agreed counts of at most 16 rows"),
        ((1,) * 8, 32, "capacity of small_m must be 8 or 16, got 32"),
    ],
)
def test_without_the_agreed_maximum_it_is_refused(counts: Any, capacity: int, sentence: str) -> None:
    with Ranks(emulated(shape_of()), seed=1) as ranks:
        ranks.bind_identity()
        with pytest.raises(IneligibleError, match=sentence):
            ranks.backends[0]._check_agreed(sub_step(counts, capacity))


def test_a_path_that_was_not_planned_says_why() -> None:
    ranks = Ranks(emulated(shape_of(), small_m_capacities=()))
    with ranks, pytest.raises(IneligibleError, match="must be built: small_m_capacities is empty, got 16"):
        ranks.backends[0]._check_agreed(sub_step((1,) * 8))


def test_a_part_without_the_planned_compute_units_is_refused() -> None:
    with Ranks(emulated(shape_of()), num_cus=16) as ranks:
        device = ranks.group.device(0)
        backend.check_device(ranks.deployment, device)
        real = emulated(shape_of(), gfx950_emulated=False)
        with pytest.raises(ConfigError, match="num_compute_units must be 16 as the device has, got 256"):
            backend.check_device(real, device)


def test_waits_end_by_themselves_and_the_next_launch_works() -> None:
    """A rank that stays away: the kernels of all others give up by their own clock, and every workgroup ends."""
    with Ranks(emulated(shape_of()), num_cus=8) as ranks:
        ranks.bind()
        batches = batches_of(ranks.shape, [2] * 8)
        for one in ranks.backends:
            one.device.tick_hz = 2.0
        present = [rank for rank in range(8) if rank != 2]
        ranks.begin(Path.SMALL_M, batches, ranks=present)
        for rank in present:
            with pytest.raises(PeerTimeoutError, match="in its payload flag|did not come") as error:
                ranks.backends[rank].finish()
            assert 2 in error.value.missing_ranks
            ranks.backends[rank].abandon(error.value)
        for one in ranks.backends:
            one.device.tick_hz = 1e9
        outs, _ = ranks.run(Path.SMALL_M, batches, epoch=1)
        compact, _ = ranks.run(Path.COMPACT, batches, epoch=2)
        assert torch.equal(torch.cat(outs), torch.cat(compact))
        assert ranks.reports() == []


def launched(one: Gfx950Backend) -> list[str]:
    """Names of the kernels that a rank has run since it was last asked."""
    stream = one.device.stream
    assert isinstance(stream, EmulatedStream)
    return [handle.kernel.name.rsplit("_kernel")[0] for handle in stream.take_handles()]


def test_paths_and_layers_in_turn_across_the_wrap() -> None:
    with Ranks(emulated(shape_of()), seed=2) as ranks:
        layers = [ranks.bind(slot_idx, slot_idx) for slot_idx in range(2)]
        for i, epoch in enumerate(range(2**32 - 4, 2**32 + 4)):
            path, slot_idx = (Path.SMALL_M, Path.COMPACT, Path.SMALL_M, Path.FIXED_SLOT)[i % 4], i // 2 % 2
            rows = [[3, 0, 1, 0, 2, 5, 0, 1], [0, 2, 0, 0, 0, 0, 1, 0]][i % 2]
            batches = batches_of(ranks.shape, rows, seed=i)
            outs, _ = ranks.run(path, batches, epoch=epoch, slot_idx=slot_idx)
            for one in ranks.backends:
                assert launched(one) == list(one.stages(path))
            check(outs, [quantized_moe(batch, layers[slot_idx], ranks.shape) for batch in batches])
        assert ranks.reports() == []


def test_a_refused_binding_leaves_everything_as_it_was() -> None:
    """Weights that fail their check, and a slot that is not there: views, graphs, memory and answers stay."""
    with Ranks(emulated(shape_of()), seed=4) as ranks:
        shape = ranks.shape
        ranks.bind(0)
        batches = batches_of(shape, UNEVEN, "zipf", seed=2)
        first, _ = ranks.run(Path.SMALL_M, batches)
        one = ranks.backends[3]
        layer, graphs = one._layers[0], dict(one._graphs)
        assert layer is not None
        assert layer.w13 is not None
        assert layer.w2 is not None
        memory = (layer.w13.codes, layer.w13.scales, layer.w2.codes, layer.w2.scales)
        before = [buffer.read(torch.uint8, (2048,)) for buffer in memory]
        other = shard(layer_weights(shape, 1), shape, 3)

        def refuse(rows: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
            rows(0, torch.ones(2, shape.hidden, dtype=torch.bfloat16))
            raise BindingError("experts must answer as their weights say")

        for slot_idx, sentence in (
            (0, "experts must answer"),
            (2, "slot_idx must be an int from 0 to 1, got 2"),
        ):
            with pytest.raises(BindingError, match=sentence):
                one.bind(slot_idx, other, refuse)
        assert one._layers[0] is layer
        assert one._layers[1] is None
        assert one._graphs == graphs
        after = [buffer.read(torch.uint8, (2048,)) for buffer in memory]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        again, _ = ranks.run(Path.SMALL_M, batches, epoch=1)
        assert torch.equal(torch.cat(first), torch.cat(again))
        assert ranks.reports() == []


def test_a_refused_launch_leaves_the_next_one_alone() -> None:
    """Every rank refuses alike before it launches; what was captured and bound serves the next sub-step."""
    with Ranks(emulated(shape_of()), seed=4) as ranks:
        ranks.bind_identity()
        batches = batches_of(ranks.shape, UNEVEN, exact=True)
        ranks.run(Path.SMALL_M, batches)
        graphs = [dict(one._graphs) for one in ranks.backends]
        too_many = batches_of(ranks.shape, [17] * 8, exact=True)
        for rank, one in enumerate(ranks.backends):
            with pytest.raises(IneligibleError, match="at most 16 rows") as error:
                ranks.begin(Path.SMALL_M, too_many, epoch=1, ranks=[rank])
            one.abandon(error.value)
        assert [dict(one._graphs) for one in ranks.backends] == graphs
        outs, _ = ranks.run(Path.SMALL_M, batches, epoch=2)
        for out, batch in zip(outs, batches, strict=True):
            assert torch.equal(out, identity_moe(batch, ranks.shape))
        assert ranks.reports() == []
