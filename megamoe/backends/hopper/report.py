"""What a sub-step's status words say: the error that all ranks raise, or the report."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from operator import itemgetter

from megamoe.backends import Launch
from megamoe.backends.hopper.board import SECTIONS
from megamoe.backends.hopper.buffers import exchanges_counts, packs_densely
from megamoe.backends.hopper.call import Call
from megamoe.backends.hopper.record import Word
from megamoe.batch import Counters, StageTimes, SubStepReport
from megamoe.bundle import Path, RowFormat
from megamoe.errors import PeerRefusedError, PeerTimeoutError
from megamoe.layout import FLAG_BYTES, FlagKind, ranks_in
from megamoe.shape import MoeShape

_reported = itemgetter(
    Word.FP8,
    Word.BYTES_SENT,
    Word.PADDED_ROWS,
    Word.DROPPED_SLOTS,
    Word.ROWS_RECEIVED,
)
_FAILED, _REFUSED, _STARTED_NS, _ENDED_NS = map(
    int, (Word.FAILED, Word.REFUSED, Word.STARTED_NS, Word.ENDED_NS)
)


def raise_failures(status: Sequence[int], launch: Launch, rank: int) -> None:
    """status: int64 [record.NUM_WORDS] as told. Raises PeerTimeoutError naming ranks that did not come,
    PeerRefusedError naming ranks that joined with the error bit."""
    if not status[_FAILED] and not status[_REFUSED]:
        return
    where = f"rank {rank}, slot {launch.slot_idx}, epoch {launch.epoch}"
    if status[Word.FAILED]:
        missing = ranks_in(status[Word.MISSING])
        kind = FlagKind(status[Word.FAILED_KIND]).name.lower()
        src_rank, seen = status[Word.FAILED_SRC], status[Word.FAILED_SEEN] & 0xFFFFFFFF
        why = (
            f"expected epoch {launch.epoch} in the {kind} flag of rank {src_rank}, seen {seen}"
            if src_rank >= 0
            else f"a peer gave up while this rank waited for {kind} flags"
        )
        raise PeerTimeoutError(f"ranks {missing} did not come ({where}): {why}", missing)
    refusing = ranks_in(status[Word.REFUSED])
    raise PeerRefusedError(
        f"ranks {refusing} refused the call of slot {launch.slot_idx}, epoch {launch.epoch}", refusing
    )


def report_of(status: Sequence[int], call: Call, shape: MoeShape) -> SubStepReport:
    """The report of a call that did not fail. Its marks must have passed."""
    sub_step, total_us = call.launch.sub_step, (status[_ENDED_NS] - status[_STARTED_NS]) / 1e3
    path, num_ranks = sub_step.path, shape.num_ranks
    fp8, sent, padded, dropped, received = _reported(status)
    counted, barriers, flag_bytes = _fixed(path, call.launch.closing, num_ranks, shape.num_experts_per_rank)
    return SubStepReport(
        path=path,
        runtime_capacity=sub_step.runtime_capacity,
        num_rows_per_rank=sub_step.num_rows_per_rank,
        row_format_per_rank=_row_formats(fp8, num_ranks),
        counters=Counters(
            count_exchanges=counted,
            prepare_passes=counted,
            launches=call.num_launches,
            group_barriers=barriers,
            bytes_sent=sent + flag_bytes,
            padded_rows=padded,
            dropped_slots=dropped,
            rows_received=received,
        ),
        times=StageTimes(**call.stage_us(), total_us=total_us),
    )


@cache
def _fixed(path: Path, closing: bool, num_ranks: int, experts_per_rank: int) -> tuple[int, int, int]:
    """(Exchanges of counts, barriers of the group, bytes of flags and counts that a rank sends to its peers)."""
    counted = exchanges_counts(path)
    num_flags = (3 if counted else 2) + closing
    if path is Path.LARGE_M:
        num_flags += SECTIONS - 1
    counts = experts_per_rank if path is Path.LARGE_M else num_ranks
    num_bytes = (num_ranks - 1) * (num_flags * FLAG_BYTES + 4 * counts * counted)
    return int(counted), int(packs_densely(path)) + int(closing), num_bytes


@cache
def _row_formats(fp8_mask: int, num_ranks: int) -> tuple[RowFormat, ...]:
    """Of each owner's rows."""
    return tuple(RowFormat.FP8 if fp8_mask >> rank & 1 else RowFormat.BF16 for rank in range(num_ranks))
