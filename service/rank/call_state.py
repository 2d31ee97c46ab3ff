"""One layer call on one rank: as it waits, as it is executed, and what can be wrong with it when its turn comes.

See call_queue.py for who moves it on.
"""

from __future__ import annotations

from dataclasses import dataclass

from megamoe.errors import InvalidArgumentError, MegaMoeError, StaleCallError, must_be
from service.board.lease import Lease, check_serial
from service.messages import ErrorReply
from service.rank.call_order import CallId
from service.rank.plan_state import PlanState, not_open
from service.ring.record import Record


@dataclass(eq=False, slots=True)
class Call:
    """A layer call of this rank's caller that waits for its turn. refusal: found wrong when it came."""

    record: Record
    call_id: CallId
    sequence: int
    plan: PlanState | None
    refusal: ErrorReply | None
    deadline: float
    timeout_s: float


@dataclass(eq=False, slots=True)
class Work:
    """What the device thread executes next. refused: join with zero rows and the error bit."""

    sequence: int
    plan: PlanState
    layer_idx: int
    call: Call | None
    refused: bool

    @property
    def timeout_s(self) -> float:
        return self.plan.timeout_s


def wrong_with(call: Call, lease: Lease, rank: int, num_layers: int) -> ErrorReply | None:
    """Why a call whose turn has come is refused on this rank, None if it is not. Its plan is settled by then."""
    assert call.plan is not None
    try:
        check_serial(lease, call.call_id.lease_serial)
        if call.plan.poison is not None:
            return call.plan.poison
        _check(call, call.plan, rank, num_layers)
    except MegaMoeError as error:
        return ErrorReply.of(error)
    return None


def _check(call: Call, plan: PlanState, rank: int, num_layers: int) -> None:
    layer_idx, record = call.call_id.layer_idx, call.record
    if plan.plan is None:
        raise not_open(plan)
    if not 0 <= layer_idx < num_layers:
        raise InvalidArgumentError(must_be("layer_idx", f"from 0 to {num_layers - 1}", layer_idx))
    if layer_idx <= plan.last_layer_idx:
        wanted = f"above {plan.last_layer_idx}, the last one"
        raise StaleCallError(must_be(f"layer_idx of plan {plan.plan_id}", wanted, layer_idx))
    agreed = plan.plan.num_rows_per_rank[rank]
    if record.num_rows != agreed:
        wanted = f"{agreed}, as plan {plan.plan_id} agreed"
        raise InvalidArgumentError(must_be("rows of the layer call", wanted, record.num_rows))
    if agreed and record.dtype_name != plan.plan.dtype:
        raise InvalidArgumentError(
            must_be("dtype of the rows", f"{plan.plan.dtype}, as agreed", record.dtype_name)
        )
