"""A rank whose step loop is a dozen lines: it answers the ring at once. For tests of what stands before the ring."""

from __future__ import annotations

import threading
from collections.abc import Callable

from megamoe import (
    Counters,
    Deployment,
    Path,
    PathPolicy,
    RowFormat,
    StageTimes,
    StepPlan,
    SubStepReport,
    choose_path,
    plan_bundle,
)
from service.messages import (
    DoneReply,
    ErrorReply,
    IntentRequest,
    LayerReply,
    LeaseReply,
    LeaseRequest,
    PlanReply,
    Reply,
)
from service.ring.codec import LAYER
from service.ring.ring import Record, RingConsumer, RingSpec


class FakeRank:
    """Answers every layer call with twice its rows, every intent with its own counts as the plan."""

    def __init__(self, group_name: str, deployment: Deployment, *, rank: int = 0) -> None:
        self.bundle = plan_bundle(deployment)
        self.consumer = RingConsumer.create(group_name, rank, 0, RingSpec.of(deployment))
        self.seen: list[object] = []
        self.hold = threading.Event()
        self.hold.set()
        self._bell = threading.Event()
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def bell(self, control: bool) -> None:
        self._bell.set()

    def _run(self) -> None:
        while not self._stop:
            self._bell.wait(0.5)
            self._bell.clear()
            for record in self.consumer.poll():
                self.hold.wait(10.0)
                record.reply(self._answer(record))

    def _answer(self, record: Record) -> Reply:
        if record.kind == LAYER:
            head = record.layer_head()
            self.seen.append(head)
            if head.refusal:
                return ErrorReply(code=head.refusal[0], message=head.refusal[1])
            if head.layer_idx == 99:
                return ErrorReply(code="peer_timeout", message="rank 5 did not come", missing_ranks=(5,))
            rows = record.batch().hidden_states
            report = SubStepReport(
                path=Path.COMPACT,
                runtime_capacity=512,
                num_rows_per_rank=(record.num_rows,) * 8,
                row_format_per_rank=(RowFormat.BF16,) * 8,
                counters=Counters(launches=3),
                times=StageTimes(total_us=5.0),
            )
            return LayerReply(hidden_states=rows * 2, sub_steps=(report,), queue_us=1.0, total_us=2.0)
        request = record.request()
        self.seen.append(request)
        if isinstance(request, LeaseRequest):
            if request.release:
                return DoneReply()
            return LeaseReply(
                lease_serial=7,
                generation=3,
                next_sequence=11,
                next_step_id=5,
                first_sequence=11,
                first_step_id=5,
            )
        if isinstance(request, IntentRequest):
            plan = StepPlan(
                plan_id=request.plan_id,
                num_rows_per_rank=request.num_rows_per_rank or (request.num_rows,) * 8,
                phase=request.phase,
                dtype=request.dtype,
                weights_version=0,
                placement_version=0,
                policy_version=0,
            )
            policy = PathPolicy.of(self.bundle.deployment)
            return PlanReply(plan=plan, sub_steps=choose_path(plan, self.bundle, policy))
        return DoneReply()

    def wait_seen(self, kind: Callable[[object], bool]) -> bool:
        return any(kind(item) for item in self.seen)

    def close(self) -> None:
        self._stop = True
        self.hold.set()
        self._bell.set()
        self._thread.join(5.0)
        self.consumer.close()
