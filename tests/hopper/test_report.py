"""Status words become the report, or the error that names ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megamoe import Deployment, MoeBatch, MoeShape, Path, RowFormat, SubStep, plan_bundle
from megamoe.backends import Launch
from megamoe.backends.hopper.buffers import BoundLayer
from megamoe.backends.hopper.call import Call, Recipes
from megamoe.backends.hopper.record import NUM_WORDS, Word
from megamoe.backends.hopper.report import raise_failures, report_of
from megamoe.backends.hopper.staging import Outgoing
from megamoe.errors import PeerRefusedError, PeerTimeoutError
from megamoe.layout import FlagKind

SHAPE = MoeShape(hidden=96, intermediate=64, num_experts=16, num_topk=4, num_ranks=4)
BUNDLE = plan_bundle(Deployment(shape=SHAPE, backend="hopper", max_tokens_per_rank=16))


def launch_of(path: Path = Path.COMPACT, *, closing: bool = False) -> Launch:
    sub_step = SubStep.whole(path, 16, (5, 0, 1, 2))
    return Launch(
        slot_idx=2, epoch=77, buffer_idx=1, sub_step=sub_step, closing=closing, refused=False, deadline_s=0.0
    )


def status_of(**words: int) -> list[int]:
    status = [0] * NUM_WORDS
    for name, value in words.items():
        status[Word[name]] = value
    return status


def test_no_failure_raises_nothing() -> None:
    raise_failures(status_of(FP8=3, ROWS_RECEIVED=9), launch_of(), 1)


def test_missing_ranks_are_named_with_flag_expected_and_seen() -> None:
    status = status_of(
        FAILED=1,
        MISSING=0b1100,
        FAILED_KIND=int(FlagKind.PAYLOAD),
        FAILED_SRC=2,
        FAILED_SEEN=76 - (1 << 63),
        REFUSED=1,
    )
    wanted = r"\[2, 3\].*rank 1, slot 2, epoch 77.*expected epoch 77 in the payload flag of rank 2, seen 76"
    with pytest.raises(PeerTimeoutError, match=wanted) as raised:
        raise_failures(status, launch_of(), 1)
    assert raised.value.missing_ranks == (2, 3)


def test_a_peer_that_gave_up_is_said() -> None:
    status = status_of(FAILED=1, MISSING=1, FAILED_KIND=int(FlagKind.RETURN), FAILED_SRC=-1)
    with pytest.raises(PeerTimeoutError, match="a peer gave up while this rank waited for return flags"):
        raise_failures(status, launch_of(), 1)


def test_refusing_ranks_are_named() -> None:
    with pytest.raises(PeerRefusedError, match=r"\[0, 3\] refused the call of slot 2, epoch 77") as raised:
        raise_failures(status_of(REFUSED=0b1001), launch_of(), 1)
    assert raised.value.refusing_ranks == (0, 3)


@pytest.mark.parametrize(
    ("path", "closing", "counted", "bytes_a_peer"),
    [
        (Path.FIXED_SLOT, False, 0, 2 * 8),
        (Path.COMPACT, False, 1, 3 * 8 + 4 * 4),
        (Path.COMPACT, True, 1, 4 * 8 + 4 * 4),
    ],
)
def test_a_report_has_the_counts_of_the_status_and_of_the_path(
    path: Path, closing: bool, counted: int, bytes_a_peer: int
) -> None:
    launch = launch_of(path, closing=closing)
    none = torch.empty(0)
    call = Call(
        launch,
        BoundLayer(None, None),
        Recipes(BUNDLE).of(launch.sub_step),
        MoeBatch.empty(SHAPE),
        Outgoing(none, none, none),
    )
    call.num_launches = 4
    status = status_of(
        FP8=0b10,
        ROWS_RECEIVED=9,
        PADDED_ROWS=3,
        DROPPED_SLOTS=2,
        BYTES_SENT=1000,
        STARTED_NS=5_000,
        ENDED_NS=12_500,
    )
    report = report_of(status, call, SHAPE)
    counters: Any = report.counters
    assert (counters.count_exchanges, counters.prepare_passes, counters.launches) == (counted, counted, 4)
    assert counters.group_barriers == (path is Path.COMPACT) + closing
    assert counters.bytes_sent == 1000 + 3 * bytes_a_peer
    assert (counters.rows_received, counters.padded_rows, counters.dropped_slots) == (9, 3, 2)
    assert report.row_format_per_rank == (RowFormat.BF16, RowFormat.FP8, RowFormat.BF16, RowFormat.BF16)
    assert report.times.total_us == 7.5
    assert report.num_rows_per_rank == (5, 0, 1, 2)
