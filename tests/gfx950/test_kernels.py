"""Each kernel against its reference of the same name, from the memory that it reads to the memory that it writes."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from megamoe import mx
from megamoe.backends import Launch
from megamoe.backends.gfx950 import references
from megamoe.backends.gfx950.build import load_or_compile
from megamoe.backends.gfx950.device.emulated import WEIGHTS_CLASS, EmulatedGroup
from megamoe.backends.gfx950.emulator import DeviceConfig
from megamoe.backends.gfx950.emulator.report import Traffic
from megamoe.backends.gfx950.launches import PackedMemory, RankLaunches, alone_specs
from megamoe.backends.gfx950.lockstep import NUM_CUS, Ranks, batches_of, emulated, shape_of
from megamoe.backends.gfx950.plan import inner_bytes, plan_launch
from megamoe.backends.gfx950.record import Word
from megamoe.backends.gfx950.shuffle import pack_layer
from megamoe.batch import MoeBatch
from megamoe.bundle import Path, RowFormat, plan_bundle
from megamoe.layout import plan_layout
from megamoe.path import SubStep
from megamoe.reference import relative_l2
from megamoe.shape import MoeShape
from megamoe.weights import random_layer_weights

PATHS = (Path.FIXED_SLOT, Path.COMPACT)


def staged(ranks: Ranks, batches: list[MoeBatch]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(rows, words) of every rank as quantize must leave them."""
    layout = ranks.backends[0].launches.layout
    pairs = [references.quantize(layout, b.hidden_states, b.topk_ids, b.topk_weights) for b in batches]
    return [rows for rows, _ in pairs], [words for _, words in pairs]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row_format", [RowFormat.BF16, RowFormat.FP8])
def test_memory_after_every_kernel_of_a_sub_step(path: Path, row_format: RowFormat) -> None:
    """Identity experts, so that all of it is exact: staged rows, places, lists, payload, result rows, outputs."""
    fp8 = row_format is RowFormat.FP8
    with Ranks(
        emulated(shape_of(544, 96, num_experts=16, num_topk=4), combine_row_format=row_format), seed=9
    ) as ranks:
        ranks.bind_identity()
        shape, layout = ranks.shape, ranks.backends[0].launches.layout
        batches = batches_of(
            shape, [3, 0, 5, 1, 2, 4, 0, 9], seed=4, no_expert_share=0.2, duplicate_share=0.2
        )
        outs, _ = ranks.run(path, batches)
        assert ranks.reports() == []
        rows, words = staged(ranks, batches)
        plan = plan_launch(shape, 9, NUM_CUS)
        capacity = plan_bundle(ranks.deployment).capacities(path)[-1] if path is Path.FIXED_SLOT else None
        regions = [
            torch.zeros(b.num_rows * shape.num_topk, layout.result_bytes, dtype=torch.uint8) for b in batches
        ]
        for rank, backend in enumerate(ranks.backends):
            launches, n = backend.launches, batches[rank].num_rows
            assert torch.equal(launches.rows.read(torch.uint8, rows[rank].shape), rows[rank])
            got_words = launches.meta.read(torch.int32, words[rank].shape)
            used = 1 + 2 * shape.num_topk
            assert torch.equal(got_words[:, :used], words[rank][:, :used])
            if path is Path.COMPACT:
                slots, counts = references.prepare(layout, words[rank])
                assert torch.equal(launches.token_slots.read(torch.int32, slots.shape), slots)
                assert torch.equal(launches.sent_counts.read(torch.int32, counts.shape), counts)
            want = references.dispatch(layout, rank, words, capacity=capacity, tile_shift=plan.tile_shift)
            assert torch.equal(launches.experts.read(torch.int32, want.experts.shape), want.experts)
            assert torch.equal(launches.row_table.read(torch.int32, want.row_table.shape), want.row_table)
            source = want.row_table[:, 1].long() >> 20
            result = want.row_table[:, 1].long() & (1 << 20) - 1
            at = layout.region("payload_rows0").offset
            payload = launches.heap.read(torch.uint8, (layout.max_rows_received, layout.row_bytes), at)
            for place, src, index in zip(
                want.row_table[:, 0].tolist(), source.tolist(), result.tolist(), strict=True
            ):
                assert torch.equal(payload[place], rows[src][index // shape.num_topk])
            sent = references.result_rows(references.identity(payload, want, shape.hidden), want, fp8=fp8)
            for one, src, index in zip(sent, source.tolist(), result.tolist(), strict=True):
                regions[src][index] = one
            assert n == len(outs[rank])
        for rank, backend in enumerate(ranks.backends):
            at = layout.region("combine_rows0").offset
            got = backend.launches.heap.read(torch.uint8, regions[rank].shape, at)
            kept = shape.hidden + layout.sf_bytes if fp8 else layout.result_bytes
            served = (words[rank][:, 1 : 1 + shape.num_topk] >= 0).flatten()
            assert torch.equal(got[served, :kept], regions[rank][served, :kept])
            region = regions[rank].view(-1, shape.num_topk, layout.result_bytes)
            assert torch.equal(outs[rank], references.combine(layout, words[rank], region, [fp8] * 8))


def test_quantize_meets_every_kind_of_block() -> None:
    """Subnormals, zeros, the largest and smallest scales, Inf and NaN: the same bytes as the reference."""
    with Ranks(emulated(shape_of(256, 32, num_experts=8, num_topk=1))) as ranks:
        ranks.bind_identity()
        generator = torch.Generator().manual_seed(1)
        exponents = torch.randint(-133, 128, (32, 256), generator=generator)
        x = torch.randn(32, 256, generator=generator).double() * torch.exp2(exponents.double())
        x[3] = 0
        x[4, ::7] = float("nan")
        x[5, 100] = float("-inf")
        x[6] = 448 * torch.exp2(torch.arange(8.0)).repeat_interleave(32)
        x[7] = 1e-45
        batches = [MoeBatch.empty(ranks.shape)] * 7
        ids, weights = torch.zeros(32, 1, dtype=torch.int32), torch.ones(32, 1)
        batches.insert(2, MoeBatch.of(ranks.shape, x.bfloat16(), ids, weights))
        ranks.run(Path.FIXED_SLOT, batches)
        rows, _ = staged(ranks, batches)
        assert torch.equal(ranks.backends[2].launches.rows.read(torch.uint8, rows[2].shape), rows[2])


def run_gemms(
    shape: MoeShape, block_m: int, counts: list[int], *, fp8: bool, checked: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, list[Traffic]]:
    """Both GEMMs of one rank alone on rows that are there already: (inner, its reference, results, theirs, traffic)."""
    deployment = emulated(shape, max_tokens_per_rank=256, large_m_capacity=256)
    layout = plan_layout(plan_bundle(deployment))
    config = DeviceConfig(num_cus=NUM_CUS, num_ranks=1, seed=1, detect_lds=checked, detect_waits=checked)
    group = EmulatedGroup(1, layout.num_bytes, config)
    launches = RankLaunches(group.device(0), layout, fp8=fp8)
    weights = random_layer_weights(shape, seed=5)
    packed = [PackedMemory.upload(launches.device, one, "w") for one in pack_layer(weights, shape)]
    generator = torch.Generator().manual_seed(block_m)
    num_rows = sum(counts)
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).int()[:, None]
    x = torch.randn(num_rows, shape.hidden, generator=generator).bfloat16()
    routing = torch.rand(num_rows, 1, generator=generator) + 0.1
    rows, words = references.quantize(layout, x, ids, routing)
    want = references.dispatch(layout, 0, [words], capacity=None, tile_shift=block_m.bit_length() - 1)
    plan = replace(plan_launch(shape, num_rows, NUM_CUS), block_m=block_m)
    sub_step = SubStep.whole(Path.COMPACT, 256, (num_rows,))
    launch = Launch(
        slot_idx=0,
        epoch=1,
        buffer_idx=0,
        sub_step=sub_step,
        closing=False,
        refused=False,
        deadline_s=time.monotonic() + 60,
    )
    launches.begin(launch, MoeBatch.of(shape, x, ids, routing), 10**12)
    launches.heap.write(rows, layout.region("payload_rows0").offset)
    launches.experts.write(want.experts)
    launches.row_table.write(want.row_table)
    specs = alone_specs(layout, block_m=block_m, fp8=fp8)
    launches.gemm1(load_or_compile(specs["gemm1"]), plan, packed[0])
    launches.gemm2(load_or_compile(specs["gemm2"]), plan, packed[1])
    group.devices.synchronize()
    assert [report.text for report in group.devices.reports()] == []
    inner_rows = launches.inner.read(torch.uint8, (num_rows, inner_bytes(shape.intermediate)))
    inner = references.decode_rows(inner_rows, shape.intermediate)
    want_inner = mx.dequantize_mxfp8(
        *mx.quantize_mxfp8(references.gemm1(rows, want, weights, shape.hidden, shape.swiglu_limit))
    )
    at = layout.region("combine_rows0").offset
    sent = launches.heap.read(torch.uint8, (num_rows, layout.result_bytes), at)
    if fp8:
        codes, sf = sent[:, : shape.hidden], sent[:, shape.hidden : shape.hidden + layout.sf_bytes]
        results = mx.dequantize_mxfp8(codes.contiguous(), sf.contiguous())
    else:
        results = sent.view(torch.bfloat16).float()
    want_results = references.gemm2(inner, want, weights)
    if fp8:
        want_results = mx.dequantize_mxfp8(*mx.quantize_mxfp8(want_results * routing))
    traffic = [handle.traffic for handle in launches.device.stream.take_handles()]
    assert launches.status()[Word.ROWS_RETURNED] == 0
    group.devices.close()
    return inner, want_inner, results, want_results, traffic


@pytest.mark.parametrize("block_m", [32, 64, 128])
@pytest.mark.parametrize("fp8", [False, True])
def test_gemms_of_every_tile(block_m: int, fp8: bool) -> None:
    """Full and partial tiles, an expert without rows, and one with several tiles."""
    shape = MoeShape(hidden=640, intermediate=288, num_experts=4, num_topk=1, num_ranks=1, swiglu_limit=2.0)
    counts = [block_m + 5, 0, 1, block_m]
    if sum(counts) > 256:
        counts = [block_m + 5, 0, 1, 17]
    inner, want_inner, results, want_results, _ = run_gemms(shape, block_m, counts, fp8=fp8)
    assert relative_l2(inner, want_inner) <= 1e-2
    assert relative_l2(results, want_results) <= (1e-2 if fp8 else 4e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("block_m", "rows", "fp8"), [(32, 32, False), (32, 9, True), (64, 64, True)])
def test_one_tile_of_the_tuned_shape(block_m: int, rows: int, fp8: bool) -> None:
    """7168 x 3072: right, each weight byte once, by 16-byte loads, and no matrix instruction too many."""
    shape = MoeShape(
        hidden=7168, intermediate=3072, num_experts=1, num_topk=1, num_ranks=1, swiglu_limit=10.0
    )
    inner, want_inner, results, want_results, traffic = run_gemms(
        shape, block_m, [rows], fp8=fp8, checked=False
    )
    assert relative_l2(inner, want_inner) <= 1e-2
    assert relative_l2(results, want_results) <= (1e-2 if fp8 else 4e-3)
    for one, n, k in zip(
        traffic, (2 * shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate), strict=True
    ):
        weight_bytes = n * k * 17 // 32
        assert one.loaded(WEIGHTS_CLASS) <= 1.05 * weight_bytes
        assert one.loaded(WEIGHTS_CLASS, 16) >= 0.95 * one.loaded(WEIGHTS_CLASS)
        padded_tiles = block_m // 16 * (n // 16) * (k // 128)
        assert one.num_mfma <= 1.1 * padded_tiles
