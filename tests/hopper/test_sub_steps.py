"""A sub-step from request to report, with the stages' references in the place of kernels and no GPU.

The control block, the request, the status, staging and the order of launches are the real ones.
"""

from __future__ import annotations

import ctypes
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from megamoe import Deployment, MoeBatch, MoeShape, Path, RowFormat, SubStep, plan_bundle
from megamoe.backends import Launch
from megamoe.backends.hopper import references
from megamoe.backends.hopper.call import STAGES, GraphKey
from megamoe.backends.hopper.lockstep import IDENTITY, Lockstep
from megamoe.backends.hopper.record import FIRST_STATUS, Word
from megamoe.backends.hopper.staging import Staging
from megamoe.backends.hopper.sub_steps import SubSteps
from megamoe.errors import BindingError, InternalError, PeerRefusedError, PeerTimeoutError, UnavailableError
from megamoe.reference import identity_moe
from megamoe.routing import route_rank

SHAPE = MoeShape(hidden=96, intermediate=64, num_experts=8, num_topk=4, num_ranks=1)
BUNDLE = plan_bundle(Deployment(shape=SHAPE, backend="hopper", max_tokens_per_rank=16, fixed_slot_max=16))
CPU = torch.device("cpu")


class Kernels:
    """What SubSteps asks of Kernels, for one rank with identity experts. said: the launches, in order."""

    def __init__(self) -> None:
        self.group = Lockstep(BUNDLE, CPU).group
        self.buffers = self.group.ranks[0]
        self.said: list[str] = []
        self.status: dict[Word, int] = {}

    def take(self, max_rows: int) -> None:
        self.said.append("take")
        control, request = self.buffers.control, self.buffers.request
        control.copy_(request)
        control[FIRST_STATUS:] = 0
        control[Word.STARTED_NS] = 1000
        for src, dst in ((Word.IDS_SRC, Word.IDS_PTR), (Word.WEIGHTS_SRC, Word.WEIGHTS_PTR)):
            num_bytes = 4 * SHAPE.num_topk * int(control[Word.NUM_ROWS])
            ctypes.memmove(int(control[dst]), int(control[src]), num_bytes)

    def tell(self) -> None:
        self.said.append("tell")
        for word, value in self.status.items():
            self.buffers.control[word] = value
        self.buffers.report[FIRST_STATUS:] = self.buffers.control[FIRST_STATUS:]
        self.buffers.report[Word.ENDED_NS] = 3500

    def batch(self) -> references.Batch:
        """The batch that the control block names."""
        control = self.buffers.control
        rows = int(control[Word.NUM_ROWS])

        def at(word: Word, width: int, dtype: torch.dtype) -> torch.Tensor:
            raw = bytearray(ctypes.string_at(int(control[word]), rows * width * dtype.itemsize))
            return torch.frombuffer(raw, dtype=dtype).view(rows, width)

        codes, scales = references.quantize(at(Word.HIDDEN_PTR, SHAPE.hidden, torch.bfloat16))
        ids = at(Word.IDS_PTR, SHAPE.num_topk, torch.int32)
        return references.Batch(codes, scales, ids, at(Word.WEIGHTS_PTR, SHAPE.num_topk, torch.float32))

    def prepare(self) -> None:
        self.said.append("prepare")
        references.prepare(self.group, 0, self.batch())

    def dispatch(self, max_rows: int, *, compact: bool, quantized: bool) -> None:
        self.said.append("dispatch")
        references.dispatch(self.group, 0, self.batch(), compact=compact)

    def index(self, gemms: Any, capacity: int, *, compact: bool) -> None:
        references.index(self.group, 0, gemms, compact=compact)

    def identity(self) -> None:
        self.said.append("identity")
        references.identity(self.group, 0, RowFormat.BF16)

    def combine(self, max_rows: int) -> None:
        self.said.append("combine")
        references.post_return(self.group, 0, RowFormat.BF16)
        out = references.combine(self.group, 0, self.batch(), RowFormat.BF16)
        ctypes.memmove(int(self.buffers.control[Word.OUT_PTR]), out.data_ptr(), out.nbytes)

    def close(self) -> None:
        self.said.append("close")

    def abort(self) -> None:
        self.said.append(f"abort {int(self.buffers.control[Word.EPOCH])}")


class Mark:
    def __init__(self, at_ms: float) -> None:
        self.at_ms = at_ms

    def elapsed_time(self, later: Mark) -> float:
        return later.at_ms - self.at_ms


class Stream:
    """A stream on which everything has happened when it is queued."""

    def __init__(self) -> None:
        self.num_waits = 0
        self.broken = False

    def current(self) -> nullcontext[None]:
        return nullcontext()

    def mark(self, number: int) -> Mark:
        return Mark(0.25 * number)

    def synchronize(self) -> None:
        self.num_waits += 1
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore lines")


class Graphs:
    """Runs what it would capture, whenever it would replay it."""

    def __init__(self) -> None:
        self.keys: list[GraphKey] = []

    def replay(self, key: GraphKey, launch: Any) -> None:
        self.keys.append(key)
        launch()


def launch_of(path: Path, rows: int, *, epoch: int = 3, closing: bool = False) -> Launch:
    sub_step = SubStep.whole(path, 16, (rows,))
    return Launch(
        slot_idx=0,
        epoch=epoch,
        buffer_idx=epoch & 1,
        sub_step=sub_step,
        closing=closing,
        refused=False,
        deadline_s=1e9,
    )


def batch_of(rows: int) -> MoeBatch:
    """Rows that MXFP8 holds exactly, with power-of-two weights."""
    generator = torch.Generator().manual_seed(rows)
    ids, weights = route_rank(SHAPE, "uniform", rows, seed=1, rank=0, no_expert_share=0.2)
    x = torch.randint(-8, 9, (rows, SHAPE.hidden), generator=generator).bfloat16()
    return MoeBatch.of(
        SHAPE, x, ids, torch.exp2(torch.randint(-2, 2, weights.shape, generator=generator).float())
    )


def steps_of(kernels: Kernels, stream: Stream, graphs: Graphs | None) -> SubSteps:
    played: Any = stream
    parts: tuple[Any, ...] = (kernels, Staging(SHAPE, 16, CPU, played), stream, graphs)
    return SubSteps(*parts)


def run(steps: SubSteps, launch: Launch, batch: MoeBatch, out: torch.Tensor):
    steps.begin(launch, IDENTITY, batch, out)
    for stage in STAGES[launch.sub_step.path]:
        steps.launch(stage)
    return steps.finish()


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("path", [Path.FIXED_SLOT, Path.COMPACT])
def test_a_sub_step_is_the_layer(path: Path, captured: bool) -> None:
    kernels, stream, graphs = Kernels(), Stream(), Graphs() if captured else None
    steps = steps_of(kernels, stream, graphs)
    for epoch, rows in ((3, 5), (4, 16), (5, 1)):
        batch = batch_of(rows)
        out = torch.full((rows, SHAPE.hidden), float("nan")).bfloat16()
        report = run(steps, launch_of(path, rows, epoch=epoch), batch, out)
        assert torch.equal(out, identity_moe(batch, SHAPE, RowFormat.BF16))
        assert report.times.total_us == 2.5
        assert report.counters.launches == len(STAGES[path])
        # Marks are 250 us apart; a graph has none.
        assert report.times.gemm1_us == (0.0 if captured else 250.0)
    assert stream.num_waits == 3
    per_call = ["prepare"] * (path is Path.COMPACT) + ["dispatch", "identity", "combine"]
    assert kernels.said == ["take", *per_call, "tell"] * 3
    if graphs is not None:
        assert len(set(graphs.keys)) == 3


def test_the_last_of_a_cut_step_ends_with_the_closing_flag() -> None:
    kernels = Kernels()
    batch = batch_of(2)
    steps = steps_of(kernels, Stream(), None)
    report = run(
        steps, launch_of(Path.FIXED_SLOT, 2, closing=True), batch, torch.empty_like(batch.hidden_states)
    )
    assert kernels.said[-2:] == ["close", "tell"]
    assert report.counters.group_barriers == 1


def test_failures_are_raised_and_leave_nothing_behind() -> None:
    kernels = Kernels()
    steps = steps_of(kernels, Stream(), Graphs())
    batch = batch_of(3)
    out = torch.zeros_like(batch.hidden_states)
    kernels.status = {Word.FAILED: 1, Word.MISSING: 1, Word.FAILED_KIND: 1, Word.FAILED_SRC: 0}
    with pytest.raises(PeerTimeoutError, match="expected epoch 3 in the payload flag of rank 0"):
        run(steps, launch_of(Path.FIXED_SLOT, 3), batch, out)
    kernels.status = {Word.REFUSED: 1}
    with pytest.raises(PeerRefusedError):
        run(steps, launch_of(Path.FIXED_SLOT, 3, epoch=4), batch, out)
    assert not out.any()
    kernels.status = {}
    run(steps, launch_of(Path.FIXED_SLOT, 3, epoch=5), batch, out)
    assert torch.equal(out, identity_moe(batch, SHAPE, RowFormat.BF16))


def test_peers_hear_of_an_error_of_this_rank_with_the_epoch_of_the_launch() -> None:
    kernels, stream = Kernels(), Stream()
    steps = steps_of(kernels, stream, None)
    batch = batch_of(3)
    steps.begin(launch_of(Path.COMPACT, 3, epoch=77), IDENTITY, batch, torch.zeros_like(batch.hidden_states))
    steps.abandon(KeyboardInterrupt())
    assert kernels.said[-1] == "abort 77"
    assert stream.num_waits == 1
    steps.abandon(KeyboardInterrupt())
    assert kernels.said.count("abort 77") == 1
    with pytest.raises(InternalError, match="begin comes first"):
        steps.finish()


@pytest.mark.parametrize("why", ["no weights", "no room"])
def test_peers_hear_of_a_sub_step_that_could_not_begin(why: str) -> None:
    """The request in memory is still that of the launch before: its epoch would end nothing."""
    kernels, stream = Kernels(), Stream()
    steps = steps_of(kernels, stream, None)
    batch = batch_of(3)
    out = torch.zeros_like(batch.hidden_states)
    run(steps, launch_of(Path.COMPACT, 3, epoch=76), batch, out)
    layer, wanted = (None, BindingError) if why == "no weights" else (IDENTITY, RuntimeError)
    launch = launch_of(Path.COMPACT, 3, epoch=77)
    with pytest.raises(wanted) as raised:
        steps.begin(launch, layer, batch_of(17), torch.zeros((17, SHAPE.hidden)).bfloat16())
    assert steps.under_way
    steps.abandon(raised.value)
    assert kernels.said[-2:] == ["take", "abort 77"]
    assert int(kernels.buffers.control[Word.NUM_ROWS]) == 0
    assert not steps.under_way
    run(steps, launch_of(Path.COMPACT, 3, epoch=78), batch, out)
    assert torch.equal(out, identity_moe(batch, SHAPE, RowFormat.BF16))
    assert not steps.under_way


class Lent:
    """Memory of another process that holds all rows, whose owner's GPU has come to them when asked `asks` times."""

    def __init__(self, asks: int) -> None:
        self.asks = asks

    def holds(self, address: int) -> bool:
        return True

    def is_published(self) -> bool:
        self.asks -= 1
        return self.asks <= 0


def test_rows_of_another_process_are_awaited_before_the_first_launch() -> None:
    kernels = Kernels()
    steps = steps_of(kernels, Stream(), None)
    batch = batch_of(3)
    out = torch.zeros_like(batch.hidden_states)
    lent: Any = Lent(5)
    steps.lent.append(lent)
    run(steps, launch_of(Path.FIXED_SLOT, 3), batch, out)
    assert lent.asks == 0
    assert torch.equal(out, identity_moe(batch, SHAPE, RowFormat.BF16))


def test_tensors_of_callers_are_looked_up_once_and_read_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, stream = Kernels(), Stream()
    played: Any = stream
    staging = Staging(SHAPE, 16, CPU, played)
    parts: tuple[Any, ...] = (kernels, staging, stream, None)
    steps = SubSteps(*parts)
    looked: list[MoeBatch] = []
    bring = staging.bring
    monkeypatch.setattr(staging, "bring", lambda batch, result: looked.append(batch) or bring(batch, result))
    batch, other = batch_of(3), batch_of(4)
    out = torch.zeros_like(batch.hidden_states)

    def check(num_looks: int, epoch: int) -> None:
        run(steps, launch_of(Path.FIXED_SLOT, 3, epoch=epoch), batch, out)
        assert torch.equal(out, identity_moe(batch, SHAPE, RowFormat.BF16))
        assert len(looked) == num_looks

    check(1, 3)
    check(2, 4)  # this process's own: it may let go of them, and the next ones may lie elsewhere
    tensors = batch.hidden_states, batch.topk_ids, batch.topk_weights, out
    ranges = [range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors]
    for addresses in ranges:
        staging.pins.add(addresses)
    check(3, 5)
    batch.hidden_states.copy_(other.hidden_states[1:])
    batch.topk_ids.copy_(other.topk_ids[1:])
    check(3, 6)
    staging.pins.discard(ranges[0])  # the caller took it back
    check(4, 7)


def test_rows_that_never_come_end_the_call_at_its_deadline_naming_this_rank() -> None:
    kernels = Kernels()
    steps = steps_of(kernels, Stream(), None)
    batch = batch_of(3)
    never: Any = Lent(1 << 60)
    steps.lent.append(never)
    launch = launch_of(Path.FIXED_SLOT, 3)._replace(deadline_s=time.monotonic() + 0.05)
    with pytest.raises(PeerTimeoutError, match="rows of rank 0's caller did not come") as raised:
        steps.begin(launch, IDENTITY, batch, torch.zeros_like(batch.hidden_states))
    steps.abandon(raised.value)
    assert raised.value.missing_ranks == (0,)
    assert kernels.said == []


def test_peers_that_gave_up_are_told_nothing() -> None:
    kernels = Kernels()
    steps = steps_of(kernels, Stream(), None)
    batch = batch_of(3)
    steps.begin(launch_of(Path.COMPACT, 3), IDENTITY, batch, torch.zeros_like(batch.hidden_states))
    steps.abandon(PeerTimeoutError("ranks [1] did not come", [1]))
    assert kernels.said == ["take"]


def test_a_gpu_that_fails_takes_its_rank_along() -> None:
    """Every call of CUDA repeats such an error: the rank would go on refusing calls one by one."""
    kernels, stream = Kernels(), Stream()
    steps = steps_of(kernels, stream, None)
    batch = batch_of(3)
    out = torch.zeros_like(batch.hidden_states)
    stream.broken = True
    with pytest.raises(RuntimeError, match="illegal memory access") as raised:
        run(steps, launch_of(Path.COMPACT, 3, epoch=77), batch, out)
    said = (
        r"^GPU of rank 0 \(slot 0, epoch 77, sub-step 0, compact\) must be working, "
        "got RuntimeError: CUDA error: an illegal memory access was encountered$"
    )
    with pytest.raises(UnavailableError, match=said):
        steps.abandon(raised.value)
    done = list(kernels.said)
    with pytest.raises(UnavailableError, match=said):
        run(steps, launch_of(Path.COMPACT, 3, epoch=78), batch, out)
    assert kernels.said == done
