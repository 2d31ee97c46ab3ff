"""The four paths on eight processes: against the oracles, bitwise against each other, and by their counters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megamoe import MoeShape, Path, RowFormat
from megamoe.reference import (
    EXACT_REL_L2,
    QUANTIZED_REL_L2,
    exact_moe,
    identity_moe,
    quantized_moe,
    relative_l2,
    tolerance,
)
from megamoe.routing import DISTRIBUTIONS
from tests.megamoe.groups import (
    CAPACITY,
    SHAPE,
    Answer,
    Case,
    all_weights,
    batch_of,
    cases_worker,
    deployment,
    whole_batch,
    whole_output,
)
from tests.ranks import run_ranks

EVEN = (24,) * 8
UNEVEN = (64, 3, 0, 17, 40, 0, 1, 29)
FULL = (CAPACITY,) * 8

CASES = {
    **{f"{name}-even": Case(Path.COMPACT, EVEN, name) for name in DISTRIBUTIONS},
    **{f"{name}-uneven": Case(Path.COMPACT, UNEVEN, name) for name in DISTRIBUTIONS},
    "idle-but-one": Case(Path.COMPACT, (0, 0, 0, 33, 0, 0, 0, 0)),
    "one-token": Case(Path.COMPACT, (0, 0, 1, 0, 0, 0, 0, 0)),
    "no-expert": Case(Path.COMPACT, EVEN, no_expert_share=0.4),
    "nobody-at-all": Case(Path.COMPACT, EVEN, no_expert_share=1.0),
    "duplicates": Case(Path.COMPACT, EVEN, duplicate_share=0.7),
    "one_rank-full": Case(Path.COMPACT, FULL, "one_rank"),
    "quantized-rows": Case(Path.COMPACT, UNEVEN, quantized=True),
    "layer-1": Case(Path.COMPACT, EVEN, layer_idx=1),
}


def run_cases(cases: list[Case], *, identity: bool = False, **settings: object) -> list[list[Answer]]:
    """Answers [case][rank] of one group that runs all cases in order."""
    shape = settings.pop("shape", SHAPE)
    assert isinstance(shape, MoeShape)
    per_rank = run_ranks(8, cases_worker, deployment(shape, **settings), cases, identity)
    return [list(answers) for answers in zip(*per_rank, strict=True)]


Matrix = dict[tuple[str, Path], list[Answer]]


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    """Every case on every path, in one group; neighbouring calls share buffers with what the last one left there."""
    keys = [(name, path) for name in CASES for path in Path]
    answers = run_cases([CASES[name].on(path) for name, path in keys])
    return dict(zip(keys, answers, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_against_the_oracles(matrix: Matrix, name: str) -> None:
    case = CASES[name]
    batch, weights = whole_batch(case, SHAPE), all_weights(SHAPE, case.layer_idx)
    got = whole_output(matrix[name, Path.COMPACT])
    assert relative_l2(got, quantized_moe(batch, weights, SHAPE)) <= tolerance(
        QUANTIZED_REL_L2, batch.num_rows
    )
    exact = exact_moe(batch, weights, SHAPE)
    bound = tolerance(EXACT_REL_L2, batch.num_rows)
    assert relative_l2(got, exact) <= bound
    if name not in ("nobody-at-all",):
        assert got.abs().max() > 0.05, "an answer of zeros would be within no bound"


@pytest.mark.parametrize("name", CASES)
def test_same_bits_on_all_paths(matrix: Matrix, name: str) -> None:
    want = whole_output(matrix[name, Path.COMPACT])
    for path in Path:
        answers = matrix[name, path]
        assert all(answer.report.path is path for answer in answers)
        assert all(answer.row_formats == (RowFormat.BF16,) * 8 for answer in answers)
        assert torch.equal(whole_output(answers), want), path


WANTED_COUNTERS = {
    Path.COMPACT: {"count_exchanges": 1, "prepare_passes": 1, "launches": 6, "group_barriers": 1},
    Path.FIXED_SLOT: {"count_exchanges": 0, "prepare_passes": 0, "launches": 5, "group_barriers": 0},
    Path.SMALL_M: {"count_exchanges": 0, "prepare_passes": 0, "launches": 1, "group_barriers": 0},
    Path.LARGE_M: {"count_exchanges": 1, "prepare_passes": 1, "launches": 2, "group_barriers": 0},
}


@pytest.mark.parametrize("path", Path)
def test_counters_prove_the_path(matrix: Matrix, path: Path) -> None:
    for name in CASES:
        for rank, answer in enumerate(matrix[name, path]):
            counters = answer.report.counters
            got = {key: getattr(counters, key) for key in WANTED_COUNTERS[path]}
            assert got == WANTED_COUNTERS[path], (name, rank)
            ids = batch_of(CASES[name], SHAPE, rank).topk_ids
            assert counters.dropped_slots == int((ids < 0).sum())
            assert counters.padded_rows == 0
    for name, case in CASES.items():
        ids = whole_batch(case, SHAPE).topk_ids
        received = [answer.report.counters.rows_received for answer in matrix[name, path]]
        assert received == [int((ids // SHAPE.num_experts_per_rank == rank).sum()) for rank in range(8)]


@pytest.mark.parametrize("path", Path)
def test_bytes_sent_are_rows_and_flags(matrix: Matrix, path: Path) -> None:
    """Recounted from the routing: a row goes to each owner once, a result comes back for each slot."""
    case = CASES["uniform-uneven"]
    owners = [batch_of(case, SHAPE, rank).topk_ids // SHAPE.num_experts_per_rank for rank in range(8)]
    row, meta, result = 112, 48, 192
    flags = {Path.COMPACT: 3, Path.LARGE_M: 3, Path.FIXED_SLOT: 2, Path.SMALL_M: 2}[path]
    counts = {Path.COMPACT: 4 * 8, Path.LARGE_M: 4 * 4, Path.FIXED_SLOT: 0, Path.SMALL_M: 0}[path]
    for rank in range(8):
        want = 7 * (8 * flags + counts)
        if path is Path.LARGE_M:  # one flag more to every source that has rows: they are back
            want += 8 * sum(rows > 0 for peer, rows in enumerate(case.num_rows_per_rank) if peer != rank)
        for peer in set(range(8)) - {rank}:
            rows = int((owners[rank] == peer).any(1).sum())
            beside = len(owners[rank]) if path in (Path.FIXED_SLOT, Path.SMALL_M) else rows
            want += rows * row + beside * meta + int((owners[peer] == rank).sum()) * result
        assert matrix["uniform-uneven", path][rank].report.counters.bytes_sent == want


def test_times_add_up(matrix: Matrix) -> None:
    for answers in matrix.values():
        for answer in answers:
            times = answer.report.times
            stages = sum(getattr(times, f"{stage}_us") for stage in times.stages())
            assert 0 < stages <= times.total_us * 1.001


# ------------------------------------------------------------------------------------------- formats, options


@pytest.mark.parametrize("row_format", [RowFormat.FP8, RowFormat.AUTO])
def test_fp8_rows(row_format: RowFormat) -> None:
    """FP8 rows carry their weight; auto lets small_m's crowded owners choose it, and only them."""
    case = Case(Path.COMPACT, UNEVEN, "hot60", no_expert_share=0.1)
    per_path = dict(
        zip(
            Path,
            run_cases([case.on(path) for path in Path], combine_row_format=row_format, auto_fp8_min_rows=120),
            strict=True,
        )
    )
    batch, weights = whole_batch(case, SHAPE), all_weights(SHAPE)
    owners = batch.topk_ids // SHAPE.num_experts_per_rank
    crowded = tuple(
        RowFormat.FP8 if int((owners == rank).sum()) >= 120 else RowFormat.BF16 for rank in range(8)
    )
    assert set(crowded) == {RowFormat.FP8, RowFormat.BF16}, "the case must have both"
    for path, answers in per_path.items():
        if row_format is RowFormat.FP8:
            formats = (RowFormat.FP8,) * 8
        else:
            formats = crowded if path is Path.SMALL_M else (RowFormat.BF16,) * 8
        assert all(answer.row_formats == formats for answer in answers), path
        got = whole_output(answers)
        assert relative_l2(got, quantized_moe(batch, weights, SHAPE, formats)) <= QUANTIZED_REL_L2
        assert relative_l2(got, exact_moe(batch, weights, SHAPE)) <= EXACT_REL_L2
        wrong = [RowFormat.BF16 if f is RowFormat.FP8 else RowFormat.FP8 for f in formats]
        assert relative_l2(got, quantized_moe(batch, weights, SHAPE, wrong)) > QUANTIZED_REL_L2
        if row_format is RowFormat.FP8 or path is not Path.SMALL_M:
            assert torch.equal(got, whole_output(per_path[Path.COMPACT]))


def test_identity_experts_are_bitwise() -> None:
    """Transport and combine alone: exact rows and power-of-two weights come back exactly as the oracle says."""
    cases = [
        Case(Path.COMPACT, UNEVEN, name, no_expert_share=share, exact=True)
        for name, share in (("uniform", 0.2), ("one_rank", 0.0), ("boundary", 0.0))
    ]
    runs = [case.on(path) for case in cases for path in Path]
    for row_format in (RowFormat.BF16, RowFormat.FP8):
        for case, answers in zip(
            runs, run_cases(runs, identity=True, combine_row_format=row_format), strict=True
        ):
            want = identity_moe(whole_batch(case, SHAPE), SHAPE, row_format)
            assert torch.equal(whole_output(answers), want), case


@pytest.mark.parametrize("poison", ["nan", "inf", "-inf", "nan code"])
def test_non_finite_rows_stay_alone(poison: str) -> None:
    clean = Case(Path.COMPACT, UNEVEN, "hot60", no_expert_share=0.2, quantized=poison == "nan code")
    runs = [case.on(path) for path in Path for case in (clean, replace(clean, poison=poison))]
    answers = run_cases(runs + runs, combine_row_format=RowFormat.BF16)
    want = answers[0]
    for case, got in zip(runs + runs, answers, strict=True):
        for rank in range(8):
            rows, reference = got[rank].hidden_states, want[rank].hidden_states
            bad = torch.zeros(len(rows), dtype=torch.bool)
            if case.poison and rank == 1:
                served = (batch_of(case, SHAPE, rank).topk_ids >= 0).any(1)
                bad[::3] = served[::3]
            assert torch.equal(rows[~bad], reference[~bad])
            assert bool(rows[bad].isnan().any(1).all())


@pytest.mark.parametrize("row_format", [RowFormat.BF16, RowFormat.FP8])
def test_slots_without_expert_do_not_read_what_an_older_call_left(row_format: RowFormat) -> None:
    """Calls full of NaN on both buffers, then -1 slots where their rows came back."""
    sparse = Case(Path.COMPACT, UNEVEN, no_expert_share=0.5)
    dirty = replace(sparse, no_expert_share=0.0, poison="nan")
    runs = [case.on(path) for path in Path for case in (sparse, dirty, dirty, sparse, sparse)]
    answers = run_cases(runs, combine_row_format=row_format)
    for case, got in zip(runs, answers, strict=True):
        if case.on(Path.COMPACT) == sparse:
            assert torch.equal(whole_output(got), whole_output(answers[0]))
    want = quantized_moe(whole_batch(sparse, SHAPE), all_weights(SHAPE), SHAPE, row_format)
    assert relative_l2(whole_output(answers[0]), want) <= QUANTIZED_REL_L2


def test_batch_invariant_rows_do_not_depend_on_their_mates() -> None:
    """The same rows alone, among few and among many: equal bits on every path, at the cost of padding."""
    many = Case(Path.COMPACT, UNEVEN)
    few = replace(many, num_rows_per_rank=(64, 0, 0, 0, 0, 0, 0, 0))
    runs = [case.on(path) for path in Path for case in (many, few)]
    answers = run_cases(runs, batch_invariant=True)
    want = answers[0][0].hidden_states
    for got in answers:
        assert torch.equal(got[0].hidden_states, want)
    padded = [answer.report.counters.padded_rows for answer in answers[0]]
    received = [answer.report.counters.rows_received for answer in answers[0]]
    assert all(rows and (rows + pad) % 16 == 0 and pad for rows, pad in zip(received, padded, strict=True))
    batch = whole_batch(many, SHAPE)
    assert (
        relative_l2(whole_output(answers[0]), quantized_moe(batch, all_weights(SHAPE), SHAPE))
        <= QUANTIZED_REL_L2
    )


@pytest.mark.parametrize(
    "shape",
    [
        MoeShape(hidden=32, intermediate=32, num_experts=8, num_topk=6, num_ranks=8),
        MoeShape(hidden=64, intermediate=96, num_experts=12, num_topk=1, num_ranks=4, activation="gelu"),
        MoeShape(hidden=64, intermediate=32, num_experts=600, num_topk=8, num_ranks=2, swiglu_limit=1.0),
        MoeShape(hidden=64, intermediate=32, num_experts=7, num_topk=7, num_ranks=1),
        MoeShape(hidden=512, intermediate=512, num_experts=16, num_topk=4, num_ranks=8, swiglu_limit=10.0),
    ],
    ids=lambda shape: f"{shape.num_ranks}-ranks-{shape.num_experts}-experts",
)
def test_other_shapes(shape: MoeShape) -> None:
    """Fewer ranks, one expert a rank, more experts than a byte counts, a number that is no power of two, and
    matrices large enough to be packed."""
    rows = (20, 0, 33, 5, 1, 9, 12, 7)[: shape.num_ranks]
    case = Case(Path.COMPACT, rows, no_expert_share=0.1)
    per_rank = run_ranks(shape.num_ranks, cases_worker, deployment(shape), [case.on(path) for path in Path])
    outputs = [whole_output(answers) for answers in zip(*per_rank, strict=True)]
    want = quantized_moe(whole_batch(case, shape), all_weights(shape), shape)
    assert relative_l2(outputs[0], want) <= tolerance(QUANTIZED_REL_L2, sum(rows))
    assert all(torch.equal(output, outputs[0]) for output in outputs)
