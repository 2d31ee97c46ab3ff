"""From a caller's intent to what its rank brings to the board."""

from __future__ import annotations

from megamoe import PlanId, StepIntent
from megamoe.errors import InvalidArgumentError, StaleCallError, error_from_code, must_be
from service.board.intent_entries import DTYPES
from service.messages import IntentRequest

_MAX_ROWS = 2**31 - 1


def checked_intent(
    request: IntentRequest,
    plan_id: PlanId,
    *,
    rank: int,
    num_ranks: int,
    weights_version: int,
    policy_version: int,
    draining: bool,
) -> StepIntent:
    """What this rank brings. Raises what is wrong with it, of any megamoe class: an answer for all ranks.

    plan_id: as this rank's generation has it.
    """
    if request.plan_id.generation != plan_id.generation:
        raise StaleCallError(must_be("generation", plan_id.generation, request.plan_id.generation))
    if request.refusal is not None:
        raise error_from_code(*request.refusal)
    if request.timeout_s is not None and not request.timeout_s >= 0:
        raise InvalidArgumentError(must_be("timeout_s", "a number of at least 0", request.timeout_s))
    if request.dtype not in DTYPES:
        raise InvalidArgumentError(must_be("dtype", f"one of {', '.join(DTYPES)}", repr(request.dtype)))
    for rows in (request.num_rows, *(request.num_rows_per_rank or ())):
        if not 0 <= rows <= _MAX_ROWS:
            raise InvalidArgumentError(must_be("num_rows", f"from 0 to {_MAX_ROWS}", rows))
    return StepIntent(
        rank=rank,
        num_ranks=num_ranks,
        plan_id=plan_id,
        num_rows=request.num_rows,
        phase=request.phase,
        dtype=request.dtype,
        weights_version=weights_version,
        policy_version=policy_version,
        draining=draining,
        num_rows_per_rank=request.num_rows_per_rank,
    )
