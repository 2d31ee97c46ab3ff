"""What ranks owe each other: refusals, absent and late ranks, counters, rebinding, epochs that wrap."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from megamoe.backends.hopper.backend import HopperBackend
from megamoe.backends.hopper.selftest.cases import COUNTERS, PATHS, UNBOUND_SLOT, Case, batch_of, uneven
from megamoe.backends.hopper.selftest.oracle import Checks, check_case
from megamoe.backends.hopper.selftest.ranks import Ranks, rows_of
from megamoe.bundle import Path
from megamoe.errors import BindingError, PeerRefusedError, PeerTimeoutError


def check_protocol(ranks: Ranks, checks: Checks) -> None:
    """Refusals, ranks that cannot begin or do not come, counters, rebinding, epochs that wrap."""
    shape = ranks.shape
    case = Case(Path.FIXED_SLOT, uneven(shape, 32))
    for path in PATHS:
        on_path = replace(case, path=path)
        refusing = shape.num_ranks // 2
        outcomes = ranks.call(on_path, refused=refusing)
        refused = all(
            isinstance(o.error, PeerRefusedError) and o.error.refusing_ranks == (refusing,) for o in outcomes
        )
        checks.check(f"{path}: a refusal reaches all ranks", refused, str(outcomes[0].error))
        check_case(ranks, checks, on_path)
        check_unbound(ranks, checks, on_path)
        check_case(ranks, checks, on_path)
        started = time.monotonic()
        if shape.num_ranks > 1:
            absent = shape.num_ranks * 3 // 4
            outcomes = ranks.call(on_path, absent=absent, timeout_s=0.5)
            late_s = time.monotonic() - started
            named = [o.error for rank, o in enumerate(outcomes) if rank != absent]
            told = all(
                isinstance(error, PeerTimeoutError) and absent in error.missing_ranks for error in named
            )
            checks.check(f"{path}: all ranks name the absent one", told, f"{late_s:.2f} s, {named[0]}")
        check_case(ranks, checks, on_path)
        counters = [o.report.counters for o in ranks.call(on_path) if o.report is not None]
        got = {(c.count_exchanges, c.prepare_passes, c.launches, c.group_barriers) for c in counters}
        checks.check(
            f"{path}: counters", got == {COUNTERS[path]}, f"{got}, rank 0 sent {counters[0].bytes_sent} bytes"
        )
    # Captured graphs of the old weights must not come again.
    ranks.bind(0, ranks.weights[1])
    check_case(ranks, checks, replace(case, seed=9))
    for first in ((1 << 31) - 3, (1 << 32) - 3):
        ranks.next_launch = first
        for number in range(6):
            check_case(
                ranks,
                checks,
                replace(case, path=PATHS[number % len(PATHS)], seed=number, slot_idx=number % 3),
            )


def check_unbound(ranks: Ranks, checks: Checks, case: Case) -> None:
    """A rank that cannot begin a call ends it for its peers now, not at their deadline."""
    started = time.monotonic()
    outcomes = ranks.call(replace(case, slot_idx=UNBOUND_SLOT), timeout_s=20.0)
    took_s = time.monotonic() - started
    *peers, unbound = (outcome.error for outcome in outcomes)
    told = isinstance(unbound, BindingError) and all(
        isinstance(error, PeerTimeoutError) and error.missing_ranks == (len(peers),) for error in peers
    )
    name = f"{case.path}: a rank without the slot's weights ends the call for all at once"
    checks.check(name, told and took_s < 10.0, f"{took_s:.2f} s, {[*peers, unbound][0]}")


def check_in_flight(ranks: Ranks, checks: Checks, num_layers: int = 12) -> None:
    """Two micro-batches, a layer call of each in turn: a rank that is done starts the next while others are not."""
    shape = ranks.shape
    halves = [
        [Case(path, uneven(shape, most), distribution, slot_idx, seed=seed) for slot_idx in range(2)]
        for path, most, distribution, seed in (
            (Path.FIXED_SLOT, 24, "uniform", 31),
            (Path.COMPACT, ranks.bundle.deployment.max_tokens_per_rank, "hot60", 32),
        )
    ]
    alone = {case: rows_of(ranks.call(case)) for half in halves for case in half}
    cases = [halves[number % 2][number // 2 % 2] for number in range(2 * num_layers)]
    generator = torch.Generator().manual_seed(33)
    pauses_s = (0.004 * torch.rand((shape.num_ranks, len(cases)), generator=generator)).tolist()
    got = [rows_of(outcomes) for outcomes in ranks.flow(cases, pauses_s)]
    wrong = sum(not torch.equal(rows, alone[case]) for rows, case in zip(got, cases, strict=True))
    checks.check(
        f"two micro-batches in flight, {num_layers} layer calls of each", wrong == 0, f"{wrong} differ"
    )


def check_late_source(ranks: Ranks, checks: Checks) -> None:
    """large_m: a source that has counted its rows and does not send them holds up the entries that hold them, only."""
    shape, most = ranks.shape, ranks.bundle.deployment.max_tokens_per_rank
    late = shape.num_ranks - 1
    case = Case(Path.LARGE_M, (*[most] * late, 1), seed=21, no_expert_share=0.0, duplicate_share=0.0)
    touched = set(batch_of(case, shape, late).topk_ids.flatten().tolist())
    held = threading.Event()
    with ThreadPoolExecutor(1) as caller:
        running = caller.submit(ranks.call, case, late=late, held=held)
        time.sleep(0.5)
        finished = [num_finished_entries(ranks.backends[rank]) for rank in range(late)]
        held.set()
        rows = rows_of(running.result())
    per_rank = shape.num_experts_per_rank
    wanted = [
        per_rank - sum(rank * per_rank <= expert < (rank + 1) * per_rank for expert in touched)
        for rank in range(late)
    ]
    checks.check("large_m: a late source holds up its own entries, only", finished == wanted, f"{finished}")
    compact = rows_of(ranks.call(replace(case, path=Path.COMPACT)))
    checks.check("large_m: after a late source, the bits of compact", torch.equal(rows, compact))


def num_finished_entries(backend: HopperBackend) -> int:
    """Entries whose GEMM1 is done, in the launch under way."""
    buffers = backend.buffers
    with torch.cuda.stream(torch.cuda.Stream(backend.device)):
        board = buffers.board.cpu()
    lists = buffers.board_layout
    return int((board[lists.done : lists.queue1] == buffers.sizes.gemm1_groups).sum())
