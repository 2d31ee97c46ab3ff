"""All paths on eight emulated ranks: right against the oracle, bitwise in transport, no report of any detector."""

from __future__ import annotations

import threading

import pytest
import torch

from megamoe.backends.gfx950.device.emulated import EmulatedStream
from megamoe.backends.gfx950.lockstep import Ranks, batches_of, emulated, layer_weights, shape_of
from megamoe.backends.gfx950.record import Word
from megamoe.batch import MoeBatch
from megamoe.bundle import Path, RowFormat
from megamoe.errors import BindingError, ConfigError, PeerRefusedError, PeerTimeoutError
from megamoe.reference import QUANTIZED_REL_L2, identity_moe, quantized_moe, relative_l2, tolerance
from megamoe.routing import DISTRIBUTIONS
from megamoe.runtime import Runtime
from megamoe.step import Phase, PlanId, StepIntent, agree
from megamoe.weights import LayerWeights, shard

PATHS = (Path.SMALL_M, Path.FIXED_SLOT, Path.LARGE_M, Path.COMPACT)
FORMATS = (RowFormat.BF16, RowFormat.FP8)
ROWS = {
    "even": [3] * 8,
    "uneven": [1, 0, 7, 2, 5, 3, 0, 4],
    "one token": [0, 0, 0, 1, 0, 0, 0, 0],
    "idle but one": [0, 0, 0, 0, 0, 9, 0, 0],
}


def check(outs: list[torch.Tensor], wants: list[torch.Tensor], bound: float = QUANTIZED_REL_L2) -> None:
    got, want = torch.cat(outs), torch.cat(wants)
    assert torch.isfinite(got).all()
    assert relative_l2(got, want) <= tolerance(bound, len(want))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row_format", FORMATS)
def test_forward_is_right_for_every_distribution(path: Path, row_format: RowFormat) -> None:
    deployment = emulated(shape_of(), combine_row_format=row_format)
    with Ranks(deployment, seed=1) as ranks:
        weights = ranks.bind()
        for epoch, distribution in enumerate(DISTRIBUTIONS):
            rows = list(ROWS.values())[epoch % len(ROWS)]
            ranks.schedule(epoch + 1)
            batches = batches_of(
                ranks.shape, rows, distribution, seed=epoch, no_expert_share=0.1 * (epoch % 2)
            )
            outs, reports = ranks.run(path, batches, epoch=epoch)
            check(outs, [quantized_moe(batch, weights, ranks.shape, row_format) for batch in batches])
            assert {report.row_format_per_rank for report in reports} == {(row_format,) * 8}
        assert ranks.reports() == []


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row_format", FORMATS)
def test_transport_is_bitwise(path: Path, row_format: RowFormat) -> None:
    with Ranks(emulated(shape_of(), combine_row_format=row_format), seed=3) as ranks:
        ranks.bind_identity()
        for epoch, rows in enumerate(ROWS.values()):
            batches = batches_of(
                ranks.shape, rows, seed=epoch, exact=True, no_expert_share=0.2, duplicate_share=0.3
            )
            outs, _ = ranks.run(path, batches, epoch=epoch)
            for out, batch in zip(outs, batches, strict=True):
                assert torch.equal(out, identity_moe(batch, ranks.shape, row_format))
        assert ranks.reports() == []


@pytest.mark.parametrize("path", PATHS)
def test_epochs_wrap(path: Path) -> None:
    with Ranks(emulated(shape_of()), seed=5) as ranks:
        ranks.bind_identity()
        for epoch in (*range(2**31 - 2, 2**31 + 2), *range(2**32 - 2, 2**32 + 3)):
            batches = batches_of(ranks.shape, [2, 0, 1, 2, 2, 0, 1, 2], seed=epoch % 97, exact=True)
            outs, _ = ranks.run(path, batches, epoch=epoch)
            for out, batch in zip(outs, batches, strict=True):
                assert torch.equal(out, identity_moe(batch, ranks.shape))
        assert ranks.reports() == []


def test_layers_and_paths_alternate_on_one_operator() -> None:
    with Ranks(emulated(shape_of()), seed=2) as ranks:
        layers = [ranks.bind(slot_idx, slot_idx) for slot_idx in range(2)]
        for epoch in range(8):
            path, slot_idx = PATHS[epoch % len(PATHS)], epoch // 2 % 2
            batches = batches_of(ranks.shape, [epoch % 3 + 1] * 8, seed=epoch)
            outs, _ = ranks.run(path, batches, epoch=epoch, slot_idx=slot_idx)
            check(outs, [quantized_moe(batch, layers[slot_idx], ranks.shape) for batch in batches])
        assert ranks.reports() == []


@pytest.mark.parametrize("path", PATHS)
def test_eight_schedules_give_the_same_bits(path: Path) -> None:
    results = []
    with Ranks(emulated(shape_of()), seed=1) as ranks:
        ranks.bind()
        batches = batches_of(ranks.shape, ROWS["uneven"], "rank_balanced_hot", no_expert_share=0.1)
        for epoch in range(8):
            ranks.schedule(epoch + 1)
            results.append(torch.cat(ranks.run(path, batches, epoch=epoch)[0]))
        assert ranks.reports() == []
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("path", PATHS)
def test_every_wave_lists_rows(path: Path) -> None:
    """An owner gets more rows than a wave looks at: lists are then the work of several waves."""
    with Ranks(emulated(shape_of(64, 64), small_m_capacities=(32,)), seed=9) as ranks:
        weights = ranks.bind()
        for epoch, distribution in enumerate(("uniform", "one_rank")):
            batches = batches_of(
                ranks.shape, [32, 20, 32, 7, 32, 31, 0, 32], distribution, no_expert_share=0.1
            )
            outs, _ = ranks.run(path, batches, epoch=epoch)
            check(outs, [quantized_moe(batch, weights, ranks.shape) for batch in batches])
        assert ranks.reports() == []


@pytest.mark.parametrize("path", PATHS)
def test_more_rows_than_a_workgroup_has_items(path: Path) -> None:
    """Counts and lists then take several turns, each with its barriers."""
    capacity = dict(
        max_tokens_per_rank=512, fixed_slot_max=512, large_m_capacity=512, small_m_capacities=(512,)
    )
    with Ranks(emulated(shape_of(32, 32, num_experts=8, num_topk=2), **capacity), seed=12) as ranks:
        ranks.bind_identity()
        batches = batches_of(ranks.shape, [300, 0, 5, 0, 270, 0, 0, 1], "one_rank", exact=True)
        outs, _ = ranks.run(path, batches)
        for out, batch in zip(outs, batches, strict=True):
            assert torch.equal(out, identity_moe(batch, ranks.shape))
        assert ranks.reports() == []


def test_paths_agree_bitwise_and_say_what_they_did() -> None:
    with Ranks(emulated(shape_of()), seed=4) as ranks:
        weights = ranks.bind()
        batches = batches_of(ranks.shape, ROWS["uneven"], no_expert_share=0.1)
        found = {path: ranks.run(path, batches, epoch=epoch) for epoch, path in enumerate(PATHS)}
        first = torch.cat(found[PATHS[0]][0])
        assert all(torch.equal(torch.cat(outs), first) for outs, _ in found.values())
        check(found[PATHS[0]][0], [quantized_moe(batch, weights, ranks.shape) for batch in batches])
    routed = sum(int((batch.topk_ids >= 0).sum()) for batch in batches)
    for path, counted, barriers, launched in (
        (Path.SMALL_M, 0, 0, 1), (Path.FIXED_SLOT, 0, 0, 4), (Path.COMPACT, 1, 1, 5), (Path.LARGE_M, 1, 0, 2)
    ):  # fmt: skip
        reports = found[path][1]
        assert {report.counters.count_exchanges for report in reports} == {counted}
        assert {report.counters.prepare_passes for report in reports} == {counted}
        assert {report.counters.group_barriers for report in reports} == {barriers}
        assert {report.counters.launches for report in reports} == {launched}
        assert sum(report.counters.rows_received for report in reports) == routed
        assert sum(report.counters.dropped_slots for report in reports) == 6 * sum(ROWS["uneven"]) - routed


@pytest.mark.parametrize("row_format", FORMATS)
def test_bytes_sent_are_those_that_the_device_stored_to_peers(row_format: RowFormat) -> None:
    with Ranks(emulated(shape_of(64, 64), combine_row_format=row_format), checked=False) as ranks:
        ranks.bind()
        for epoch, path in enumerate(PATHS):
            batches = batches_of(ranks.shape, ROWS["uneven"], seed=3, no_expert_share=0.1)
            _, reports = ranks.run(path, batches, epoch=epoch)
            for report, backend in zip(reports, ranks.backends, strict=True):
                stream = backend.device.stream
                assert isinstance(stream, EmulatedStream)
                stored = sum(handle.traffic.remote_bytes[1] for handle in stream.take_handles())
                assert report.counters.bytes_sent == stored, (path, backend.rank)


def test_rows_that_come_quantized() -> None:
    from megamoe import mx

    with Ranks(emulated(shape_of()), seed=6) as ranks:
        weights = ranks.bind()
        plain = batches_of(ranks.shape, [4, 0, 2, 2, 1, 1, 3, 2])
        batches = [
            MoeBatch.of(ranks.shape, codes, batch.topk_ids, batch.topk_weights, sf)
            for batch in plain
            for codes, sf in [mx.quantize_mxfp8(batch.hidden_states)]
        ]
        outs, _ = ranks.run(Path.COMPACT, batches)
        again, _ = ranks.run(Path.COMPACT, plain, epoch=1)
        assert torch.equal(torch.cat(outs), torch.cat(again))
        check(outs, [quantized_moe(batch, weights, ranks.shape) for batch in batches])
        assert ranks.reports() == []


@pytest.mark.parametrize("path", [Path.SMALL_M, Path.FIXED_SLOT])
def test_a_block_that_is_not_finite_spoils_its_token_only(path: Path) -> None:
    with Ranks(emulated(shape_of())) as ranks:
        weights = ranks.bind()
        batches = batches_of(ranks.shape, [3] * 8)
        batches[2].hidden_states[1, 40] = float("inf")
        outs, _ = ranks.run(path, batches)
        want = [quantized_moe(batch, weights, ranks.shape) for batch in batches]
        assert outs[2][1].isnan().all()
        outs[2][1] = want[2][1] = 0
        check(outs, want)


@pytest.mark.parametrize(
    ("hidden", "intermediate"), [(32, 32), (96, 160), (544, 96), (640, 544), (1152, 704)]
)
def test_shapes_that_fill_no_tile(hidden: int, intermediate: int) -> None:
    with Ranks(emulated(shape_of(hidden, intermediate, num_experts=16, num_topk=3)), seed=7) as ranks:
        weights = ranks.bind()
        batches = batches_of(ranks.shape, ROWS["uneven"], no_expert_share=0.1)
        outs, _ = ranks.run(Path.COMPACT, batches)
        check(outs, [quantized_moe(batch, weights, ranks.shape) for batch in batches])
        assert ranks.reports() == []


@pytest.mark.parametrize("path", [Path.SMALL_M, Path.FIXED_SLOT])
def test_a_refused_call_is_an_error_on_all_ranks_and_the_next_works(path: Path) -> None:
    with Ranks(emulated(shape_of())) as ranks:
        ranks.bind_identity()
        batches = batches_of(ranks.shape, [2] * 8, exact=True)
        ranks.begin(path, batches, refusing=[3])
        for backend in ranks.backends:
            with pytest.raises(PeerRefusedError, match=r"ranks \[3\] refused") as error:
                backend.finish()
            backend.abandon(error.value)
        outs, _ = ranks.run(path, batches, epoch=1)
        assert all(
            torch.equal(out, identity_moe(b, ranks.shape)) for out, b in zip(outs, batches, strict=True)
        )


@pytest.mark.parametrize("path", [Path.SMALL_M, Path.LARGE_M, Path.COMPACT])
def test_a_rank_that_does_not_come_is_named_by_all(path: Path) -> None:
    with Ranks(emulated(shape_of())) as ranks:
        ranks.bind_identity()
        batches = batches_of(ranks.shape, [2] * 8, exact=True)
        present = [rank for rank in range(8) if rank != 5]
        ranks.begin(path, batches, ranks=present)
        for rank in present:
            with pytest.raises(PeerTimeoutError, match=r"ranks \[5\] did not come") as error:
                ranks.backends[rank].finish()
            assert error.value.missing_ranks == (5,)
            ranks.backends[rank].abandon(error.value)
        outs, _ = ranks.run(path, batches, epoch=1)
        assert all(
            torch.equal(out, identity_moe(b, ranks.shape)) for out, b in zip(outs, batches, strict=True)
        )


@pytest.mark.parametrize("path", [Path.LARGE_M, Path.COMPACT])
def test_kernels_end_their_waits_by_themselves(path: Path) -> None:
    """With a clock that is soon over, the waiting kernels give up, record who is missing and tell their peers."""
    with Ranks(emulated(shape_of()), num_cus=8) as ranks:
        ranks.bind_identity()
        for backend in ranks.backends:
            backend.device.tick_hz = 2.0
        batches = batches_of(ranks.shape, [2] * 8, exact=True)
        present = [rank for rank in range(8) if rank != 2]
        ranks.begin(path, batches, ranks=present)
        for rank in present:
            with pytest.raises(PeerTimeoutError, match="in its counts flag") as error:
                ranks.backends[rank].finish()
            assert 2 in error.value.missing_ranks
            ranks.backends[rank].abandon(error.value)


@pytest.mark.parametrize("path", PATHS)
def test_one_rank_that_gives_up_ends_the_waits_of_all(path: Path) -> None:
    """The clock of rank 0 is soon over, those of others never: they give up because they are told who is missing."""
    with Ranks(emulated(shape_of()), num_cus=8) as ranks:
        ranks.bind_identity()
        ranks.backends[0].device.tick_hz = 2.0
        batches = batches_of(ranks.shape, [2] * 8, exact=True)
        present = [rank for rank in range(8) if rank != 2]
        ranks.begin(path, batches, ranks=present)
        for rank in present:
            with pytest.raises(PeerTimeoutError, match=r"expected epoch 0 in its \w+ flag") as error:
                ranks.backends[rank].finish()
            assert 2 in error.value.missing_ranks
            ranks.backends[rank].abandon(error.value)


def test_kernels_after_one_that_gave_up_send_nothing() -> None:
    """Their peers have gone on: what came late would meet another launch."""
    with Ranks(emulated(shape_of()), checked=False) as ranks:
        ranks.bind()
        batches = batches_of(ranks.shape, [2] * 8)
        ranks.run(Path.COMPACT, batches)
        for backend in ranks.backends:
            backend.device.tick_hz = 2.0
            backend.device.stream.take_handles()  # type: ignore[attr-defined]
        present = [rank for rank in range(8) if rank != 2]
        ranks.begin(Path.COMPACT, batches, epoch=2, ranks=present)
        for rank in present:
            with pytest.raises(PeerTimeoutError) as error:
                ranks.backends[rank].finish()
            ranks.backends[rank].abandon(error.value)
            launches = ranks.backends[rank].device.stream.take_handles()  # type: ignore[attr-defined]
            sent = {one.kernel.name.rsplit("_kernel")[0]: one.traffic.remote_bytes[1] for one in launches}
            assert sent.pop("prepare") > 0
            assert sent == {"quantize": 0, "dispatch_gemm1": 0, "gemm2": 0, "combine": 0}


@pytest.mark.parametrize("path", PATHS)
def test_slots_are_summed_in_ascending_order(path: Path) -> None:
    """2^25 - 2^25 + 1 is 1 in that order, and 0 in the other: fp32 cannot hold 2^25 - 1."""
    with Ranks(emulated(shape_of(64, 64, num_experts=16, num_topk=3))) as ranks:
        ranks.bind_identity()
        x = torch.ones(2, 64, dtype=torch.bfloat16)
        ids = torch.tensor([[0, 7, 15], [14, 3, 1]], dtype=torch.int32)
        weights = torch.tensor([[2.0**25, -(2.0**25), 1.0]] * 2)
        batches = [MoeBatch.of(ranks.shape, x, ids, weights)] * 8
        for out in ranks.run(path, batches)[0]:
            assert torch.equal(out, x)


def test_bindings_are_checked_on_the_device_and_swapped_whole() -> None:
    from megamoe.selftest import check_expert

    with Ranks(emulated(shape_of())) as ranks:
        shape, backend = ranks.shape, ranks.backends[0]
        weights = shard(layer_weights(shape), shape, 0)
        backend.bind(0, weights, lambda rows: check_expert(weights, shape, rows, slot_idx=0))
        wrong = LayerWeights(weights.w13_codes.flip(1), *list(weights.tensors().values())[1:])
        before = backend._layers[0]
        with pytest.raises(BindingError, match="within relative L2"):
            backend.bind(0, wrong, lambda rows: check_expert(weights, shape, rows, slot_idx=0))
        assert backend._layers[0] is before
        assert ranks.reports() == []


@pytest.mark.parametrize("path", [Path.SMALL_M, Path.FIXED_SLOT])
def test_graphs_follow_their_binding(path: Path) -> None:
    with Ranks(emulated(shape_of(num_layers=1)), checked=False) as ranks:
        batches = batches_of(ranks.shape, [2] * 8)
        for epoch, layer_idx in enumerate((0, 0, 1, 1)):
            if epoch % 2 == 0:
                weights = ranks.bind(0, layer_idx)
            outs, _ = ranks.run(path, batches, epoch=epoch)
            check(outs, [quantized_moe(batch, weights, ranks.shape) for batch in batches])
            assert all(len(backend._graphs) == 1 for backend in ranks.backends)


def test_what_is_not_served_is_refused() -> None:
    with pytest.raises(ConfigError, match="activation on gfx950 must be silu, got gelu"):
        Ranks(emulated(shape_of(activation="gelu")))
    with Ranks(emulated(shape_of())) as ranks, pytest.raises(BindingError, match="slot 1 has no weights"):
        ranks.begin(Path.COMPACT, batches_of(ranks.shape, [1] * 8), slot_idx=1)


def test_through_the_runtime_with_a_thread_a_rank() -> None:
    """open, bind_layer with its self-check, forward on all paths, cut steps, close: as a service would."""
    shape = shape_of(num_ranks=4, num_experts=16, num_layers=1)
    deployment = emulated(
        shape,
        max_tokens_per_rank=8,
        fixed_slot_max=4,
        small_m_capacities=(),
        large_m_capacity=8,
        large_m_min_tokens=6,
        large_m_enabled=True,
    )
    weights = layer_weights(shape)
    steps = [[2, 0, 3, 1], [8, 5, 0, 7], [13, 20, 0, 9], [7, 0, 1, 2], [14, 0, 3, 16]]
    phases = [Phase.DECODE] * 3 + [Phase.PREFILL] * 2
    batches = [batches_of(shape, rows, seed=i, no_expert_share=0.1) for i, rows in enumerate(steps)]
    paths: dict[int, list[Path]] = {}
    outs: dict[tuple[int, int], torch.Tensor] = {}
    errors: list[BaseException] = []

    def rank_main(rank: int) -> None:
        try:
            with Runtime.open(deployment, rank=rank, group_name="megamoe-gfx950-test") as runtime:
                runtime.bind_layer(0, shard(weights, shape, rank))
                for i, rows in enumerate(steps):
                    intents = [
                        StepIntent(
                            rank=peer, num_ranks=4, plan_id=PlanId(1, i, 0), num_rows=count,
                            phase=phases[i] if count else Phase.IDLE,
                        )
                        for peer, count in enumerate(rows)
                    ]  # fmt: skip
                    out = runtime.forward(batches[i][rank], agree(intents), 0, timeout_s=60)
                    outs[i, rank] = out.hidden_states
                    paths[i] = [sub_step.path for sub_step in out.sub_steps]
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert not errors
    assert paths == {
        0: [Path.FIXED_SLOT], 1: [Path.COMPACT], 2: [Path.COMPACT] * 2 + [Path.FIXED_SLOT],
        3: [Path.LARGE_M], 4: [Path.LARGE_M] * 2,
    }  # fmt: skip
    for i in range(len(steps)):
        check([outs[i, rank] for rank in range(4)], [quantized_moe(b, weights, shape) for b in batches[i]])


@pytest.mark.parametrize("path", [Path.SMALL_M, Path.FIXED_SLOT, Path.LARGE_M])
def test_one_buffer_twice_in_a_row(path: Path) -> None:
    """After a skipped sequence: a fast rank must not overwrite flags that an idle one has yet to see."""
    with Ranks(emulated(shape_of()), seed=11) as ranks:
        ranks.bind_identity()
        batches = batches_of(ranks.shape, [2, 0, 0, 1, 0, 3, 0, 0], exact=True)
        outs = [ranks.begin(path, batches, epoch=epoch) for epoch in (0,)]
        for epoch in (0, 2, 4, 6):
            for backend in ranks.backends:
                backend.finish()
            for out, batch in zip(outs[-1], batches, strict=True):
                assert torch.equal(out, identity_moe(batch, ranks.shape))
            outs.append(ranks.begin(path, batches, epoch=epoch + 2))
        assert all(backend.finish().path is path for backend in ranks.backends)
        assert ranks.reports() == []


def test_all_sources_are_waited_for_where_a_buffer_comes_twice() -> None:
    """Else those that have rows by the agreed counts: it is in the control block that the kernels read."""
    found = []
    with Ranks(emulated(shape_of()), checked=False) as ranks:
        ranks.bind_identity()
        batches = batches_of(ranks.shape, [2, 0, 0, 1, 0, 3, 0, 0], exact=True)
        for epoch in (0, 1, 3, 4):
            ranks.run(Path.FIXED_SLOT, batches, epoch=epoch)
            controls = [backend.launches.control for backend in ranks.backends]
            found.append({int(one.read(torch.int64, (1,), 8 * Word.SOURCES)) for one in controls})
    assert found == [{0b101001}, {0b101001}, {0xFF}, {0b101001}]


def test_a_real_device_is_refused_where_there_is_none() -> None:
    from megamoe.backends import open_backend
    from megamoe.bundle import Deployment, plan_bundle

    bundle = plan_bundle(Deployment(shape=shape_of(), backend="gfx950"))
    with pytest.raises(ConfigError, match="needs a ROCm build of torch and an MI355X"):
        open_backend("gfx950", bundle, rank=0, group_name="megamoe-none", num_slots=1, timeout_s=1.0)


@pytest.mark.parametrize("path", PATHS)
def test_on_all_compute_units(path: Path) -> None:
    """256 compute units in 8 dies, as an MI355X has: grids of that size, workgroups spread over the dies."""
    with Ranks(emulated(shape_of()), seed=13, num_cus=256) as ranks:
        weights = ranks.bind()
        most = 16 if path is Path.SMALL_M else 32
        batches = batches_of(ranks.shape, [12, 0, 3, most, 1, 5, 2, 9], "zipf", no_expert_share=0.1)
        outs, _ = ranks.run(path, batches)
        check(outs, [quantized_moe(batch, weights, ranks.shape) for batch in batches])
        assert ranks.reports() == []


@pytest.mark.parametrize("path", PATHS)
def test_a_rank_that_cannot_go_on_tells_its_peers_at_once(path: Path) -> None:
    with Ranks(emulated(shape_of())) as ranks:
        for backend in ranks.backends[:6] + ranks.backends[7:]:
            backend.bind_identity(0)
        batches = batches_of(ranks.shape, [2] * 8, exact=True)
        present = [rank for rank in range(8) if rank != 6]
        ranks.begin(path, batches, ranks=present)
        with pytest.raises(BindingError, match="slot 0 has no weights") as error:
            ranks.begin(path, batches, ranks=[6])
        ranks.backends[6].abandon(error.value)
        for rank in present:
            with pytest.raises(PeerTimeoutError, match=r"ranks \[6\] did not come") as timeout:
                ranks.backends[rank].finish()
            ranks.backends[rank].abandon(timeout.value)
        ranks.backends[6].bind_identity(0)
        outs, _ = ranks.run(path, batches, epoch=1)
        assert all(
            torch.equal(out, identity_moe(b, ranks.shape)) for out, b in zip(outs, batches, strict=True)
        )
