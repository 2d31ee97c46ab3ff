"""Random interleavings over ranks and micro-batches: no deadlock, no two plans, one order, the right values.

Callers send per rank and micro-batch in program order; everything else (which rank hears what first, when a rank's
threads get to run, when a caller sends ahead) is chosen by hypothesis. The clock stands still, so that a wait
that only a timeout could end is a failure.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field, replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe import Phase, PlanId, unlink_all
from service.board.admission import AdmissionLimits
from service.messages import (
    CloseRequest,
    DrainRequest,
    ErrorReply,
    IntentRequest,
    LayerReply,
    LayerRequest,
    LeaseRequest,
    PlanReply,
    PolicyRequest,
    Request,
)
from service.rank.step_loop import LoopSettings
from tests.service.simulation import NUM_LAYERS, Group, Sent, rows_of, simulated_group

_names = itertools.count()
_ROOMY = LoopSettings(limits=AdmissionLimits(max_queued_calls=1000, max_open_rows=1000))


@dataclass(frozen=True)
class Step:
    """One step of the callers' program. refuse: (rank, layer) of a call that its servicer found wrong."""

    micro_batch_idx: int
    counts: tuple[int, ...]
    phase: Phase
    with_counts: bool
    call_all: bool
    layers: tuple[int, ...]
    close: bool
    refuse: tuple[int, int] | None


@dataclass
class Stream:
    """What one rank's caller sends for one micro-batch, in order. ahead: without waiting for replies."""

    rank: int
    requests: list[Request]
    ahead: bool
    sent: list[Sent] = field(default_factory=list)


def steps(num_ranks: int) -> st.SearchStrategy[Step]:
    counts = st.tuples(*[st.sampled_from([0, 0, 1, 2, 5, 9, 16])] * num_ranks)
    layers = st.lists(st.integers(0, NUM_LAYERS - 1), unique=True, min_size=1, max_size=3)
    return st.builds(
        Step,
        micro_batch_idx=st.integers(0, 2),
        counts=counts,
        phase=st.sampled_from([Phase.DECODE, Phase.PREFILL]),
        with_counts=st.booleans(),
        call_all=st.booleans(),
        layers=layers.map(lambda values: tuple(sorted(values))),
        close=st.booleans(),
        refuse=st.none() | st.tuples(st.integers(0, num_ranks - 1), st.integers(0, 2)),
    )


def write_program(
    group: Group, program: list[Step], order: list[int], ahead: list[bool]
) -> tuple[list[Stream], dict[tuple[int, int], tuple[Step, int]]]:
    """The streams of all ranks, and per (rank, sequence) what the reply must be about."""
    lease = group.lease()
    streams = {
        (rank, micro_batch_idx): Stream(rank, [], ahead[(rank * 3 + micro_batch_idx) % len(ahead)])
        for rank in range(group.num_ranks)
        for micro_batch_idx in range(3)
    }
    # The callers decide the order of layer calls: any merge of the micro-batches' own orders.
    queues: dict[int, list[tuple[int, int]]] = {idx: [] for idx in range(3)}
    for step_idx, step in enumerate(program):
        queues[step.micro_batch_idx] += [(step_idx, layer) for layer in step.layers]
    sequence_of: dict[tuple[int, int], int] = {}
    picks = itertools.cycle(order)
    while any(queues.values()):
        ready = [idx for idx, queue in queues.items() if queue]
        sequence_of[queues[ready[next(picks) % len(ready)]].pop(0)] = lease.next_sequence + len(sequence_of)

    expected: dict[tuple[int, int], tuple[Step, int]] = {}
    for step_idx, step in enumerate(program):
        plan_id = PlanId(lease.generation, lease.next_step_id + step_idx, step.micro_batch_idx)
        for rank, rows in enumerate(step.counts):
            if step.with_counts and not rows and not step.call_all and any(step.counts):
                continue
            requests = streams[rank, step.micro_batch_idx].requests
            requests.append(
                IntentRequest(
                    lease_serial=lease.lease_serial,
                    plan_id=plan_id,
                    num_rows=rows,
                    phase=step.phase if rows else Phase.IDLE,
                    num_rows_per_rank=step.counts if step.with_counts else None,
                )
            )
            for idx, layer in enumerate(step.layers):
                sequence = sequence_of[step_idx, layer]
                refused = step.refuse == (rank, idx) and bool(rows)
                requests.append(
                    LayerRequest(
                        lease_serial=lease.lease_serial,
                        plan_id=plan_id,
                        layer_idx=layer,
                        sequence=sequence,
                        refusal=("invalid_argument", f"bad id in sequence {sequence}") if refused else None,
                        **({} if refused else rows_of(rows, seed=sequence * 8 + rank)),
                    )
                )
                expected[rank, sequence] = (step, idx)
            if step.close:
                requests.append(CloseRequest(lease_serial=lease.lease_serial, plan_id=plan_id))
    return list(streams.values()), expected


def run_program(group: Group, streams: list[Stream], choices: list[int]) -> None:
    """Let callers send and ranks turn as `choices` say, then fairly until nothing moves."""

    def send(stream: Stream) -> bool:
        at = len(stream.sent)
        if at == len(stream.requests):
            return False
        waits = [one for one in stream.sent if group.poll(one) is None]
        if waits and (not stream.ahead or len(waits) >= 4):
            return False
        stream.sent.append(group.send(stream.rank, stream.requests[at]))
        return True

    for choice in choices:
        kind, which = choice % 2, choice // 2
        if kind:
            group.turn(which % group.num_ranks)
        else:
            send(streams[which % len(streams)])
    quiet = 0
    while quiet < 4:  # agreeing takes a few turns in which nothing is sent or begun
        moved = False
        for stream in streams:
            moved |= send(stream)
        for rank in range(group.num_ranks):
            moved |= group.turn(rank)
        for stream in streams:
            moved |= any(one.reply is None and group.poll(one) is not None for one in stream.sent)
        quiet = 0 if moved else quiet + 1


def check_replies(
    group: Group, streams: list[Stream], expected: dict[tuple[int, int], tuple[Step, int]]
) -> None:
    assert not group.errors
    plans: dict[PlanId, set[object]] = {}
    errors: dict[int, set[object]] = {}
    for stream in streams:
        assert len(stream.sent) == len(stream.requests), f"rank {stream.rank}: a caller was never answered"
        for one in stream.sent:
            request, reply = one.request, one.reply
            assert reply is not None, f"rank {one.rank} never answered {request}"
            if isinstance(request, IntentRequest):
                assert isinstance(reply, PlanReply), reply
                plans.setdefault(request.plan_id, set()).add((reply.plan, reply.sub_steps))
            elif isinstance(request, LayerRequest):
                step, idx = expected[one.rank, request.sequence]
                refuser = step.refuse is not None and step.refuse[1] == idx and step.counts[step.refuse[0]]
                if refuser:
                    assert isinstance(reply, ErrorReply), reply
                    assert reply.code == "invalid_argument"
                    errors.setdefault(request.sequence, set()).add(reply)
                    continue
                assert isinstance(reply, LayerReply), (one.rank, request.sequence, reply)
                if step.counts[one.rank]:
                    assert request.hidden_states is not None
                    wanted = request.hidden_states + (request.sequence % 64 + sum(step.counts))
                    assert torch.equal(reply.hidden_states, wanted)
                assert len(reply.sub_steps) == -(-max(step.counts) // 8)
            else:
                assert not isinstance(reply, ErrorReply), reply
    assert all(len(same) == 1 for same in plans.values()), plans
    assert all(len(same) == 1 for same in errors.values()), errors
    for rank in range(group.num_ranks):
        sequences = [sequence for sequence, _, _ in group.begun[rank]]
        assert sequences == sorted(set(sequences)), "strictly in sequence order"
        assert group.begun[rank] == group.begun[0], "the same calls in the same order on all ranks"
    assert all(producer.num_in_flight == 0 for producer in group.producers), "no record leaks"


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_interleaving_deadlocks_or_splits_ranks(data: st.DataObject) -> None:
    num_ranks = data.draw(st.sampled_from([2, 4]))
    program = data.draw(st.lists(steps(num_ranks), min_size=1, max_size=6))
    order = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=12))
    ahead = data.draw(st.lists(st.booleans(), min_size=1, max_size=12))
    choices = data.draw(st.lists(st.integers(0, 127), max_size=120))
    name = f"megamoe-test-{os.getpid()}-sim-{next(_names)}"
    try:
        with simulated_group(name, num_ranks, settings=_ROOMY) as group:
            streams, expected = write_program(group, program, order, ahead)
            run_program(group, streams, choices)
            check_replies(group, streams, expected)
    finally:
        unlink_all(name)


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_whatever_callers_do_wrong_all_are_answered_and_the_group_goes_on(data: st.DataObject) -> None:
    """Messages lost, repeated, changed or in the wrong order: nothing hangs beyond timeouts, nothing is poisoned."""
    num_ranks = data.draw(st.sampled_from([2, 4]))
    program = data.draw(st.lists(steps(num_ranks), min_size=1, max_size=4))
    order = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
    choices = data.draw(st.lists(st.integers(0, 127), max_size=60))
    wrongs = data.draw(
        st.lists(
            st.tuples(st.integers(0, 200), st.sampled_from(WRONGS), st.integers(0, 3)), min_size=1, max_size=6
        )
    )
    name = f"megamoe-test-{os.getpid()}-sim-{next(_names)}"
    try:
        with simulated_group(name, num_ranks, settings=_ROOMY) as group:
            streams, _ = write_program(group, program, order, [True])
            for at, wrong, amount in wrongs:
                stream = streams[at % len(streams)]
                if stream.requests:
                    spoil(stream.requests, (at // len(streams)) % len(stream.requests), wrong, amount)
            for _ in range(20):
                run_program(group, streams, choices)
                choices = []
                if all(one.reply is not None for stream in streams for one in stream.sent) and all(
                    len(stream.sent) == len(stream.requests) for stream in streams
                ):
                    break
                group.time_out()
            for stream in streams:
                assert len(stream.sent) == len(stream.requests), "a caller was never answered"
                assert all(one.reply is not None for one in stream.sent)
            assert not group.inside
            plans: dict[PlanId, set[object]] = {}
            for stream in streams:
                for one in stream.sent:
                    if isinstance(one.reply, PlanReply):
                        plans.setdefault(one.reply.plan.plan_id, set()).add(
                            (one.reply.plan, one.reply.sub_steps)
                        )
            assert all(len(same) == 1 for same in plans.values())
            assert all(producer.num_in_flight == 0 for producer in group.producers)
            still_works(group)
    finally:
        unlink_all(name)


WRONGS = ("drop", "repeat", "swap", "sequence", "layer", "plan", "rows", "counts", "lease", "generation")


def spoil(requests: list[Request], at: int, wrong: str, amount: int) -> None:
    """Change one message of a stream, or its place."""
    request = requests[at]
    if wrong == "drop":
        del requests[at]
    elif wrong == "repeat":
        requests.insert(at, request)
    elif wrong == "swap":
        requests[at], requests[at - 1] = requests[at - 1], requests[at]
    elif wrong == "lease" and not isinstance(request, (LeaseRequest, PolicyRequest, DrainRequest)):
        requests[at] = replace(request, lease_serial=request.lease_serial + amount)
    elif isinstance(request, LayerRequest):
        plan_id = request.plan_id
        changes: dict[str, object] = {
            "sequence": {"sequence": request.sequence + amount},
            "layer": {"layer_idx": request.layer_idx + amount},
            "plan": {
                "plan_id": PlanId(plan_id.generation, plan_id.step_id + amount, plan_id.micro_batch_idx)
            },
            "generation": {"plan_id": PlanId(6, plan_id.step_id, plan_id.micro_batch_idx)},
            "rows": rows_of(amount, seed=amount)
            or dict.fromkeys(("hidden_states", "topk_ids", "topk_weights")),
        }
        requests[at] = replace(request, **changes.get(wrong, {}))  # type: ignore[arg-type]
    elif isinstance(request, IntentRequest):
        plan_id = request.plan_id
        counts = request.num_rows_per_rank
        changes = {
            "plan": {
                "plan_id": PlanId(plan_id.generation, plan_id.step_id + amount, plan_id.micro_batch_idx)
            },
            "generation": {"plan_id": PlanId(6, plan_id.step_id, plan_id.micro_batch_idx)},
            "rows": {"num_rows": request.num_rows + amount},
            "counts": {"num_rows_per_rank": None if counts is None else (*counts[1:], amount)},
        }
        requests[at] = replace(request, **changes.get(wrong, {}))  # type: ignore[arg-type]


def still_works(group: Group) -> None:
    """After everything, a new caller group gets a whole step through."""
    group.ask(0, LeaseRequest(holder="tier", release=True))
    lease = group.lease("next")
    plan_id = PlanId(lease.generation, lease.next_step_id, 0)
    intents: dict[int, Request] = {
        rank: IntentRequest(lease_serial=lease.lease_serial, plan_id=plan_id, num_rows=1, phase=Phase.DECODE)
        for rank in range(group.num_ranks)
    }
    assert all(isinstance(reply, PlanReply) for reply in group.ask_all(intents).values())
    calls: dict[int, Request] = {
        rank: LayerRequest(
            lease_serial=lease.lease_serial,
            plan_id=plan_id,
            layer_idx=0,
            sequence=lease.next_sequence,
            **rows_of(1, seed=rank),
        )
        for rank in range(group.num_ranks)
    }
    replies = group.ask_all(calls)
    assert all(isinstance(reply, LayerReply) for reply in replies.values()), replies
