"""Values of megamoe <-> messages of moe.proto, both ways, and the one table from errors to gRPC status.

Owns: how plans, reports, shapes, policies and errors are spelled on the wire. Enum values are `PREFIX_` plus the
spelling used everywhere else. Refuses unknown enum values with InvalidArgumentError.
"""

from __future__ import annotations

from dataclasses import fields
from enum import StrEnum
from typing import Any, TypeVar

import grpc

from megamoe import (
    Counters,
    MoeShape,
    Path,
    PathPolicy,
    Phase,
    PlanId,
    RowFormat,
    StageTimes,
    StepPlan,
    SubStep,
    SubStepReport,
)
from megamoe.errors import InternalError, InvalidArgumentError, must_be
from service.messages import ErrorReply
from service.pb import moe_pb2 as pb

_Code = grpc.StatusCode
STATUS_BY_CODE: dict[str, grpc.StatusCode] = {
    "invalid_argument": _Code.INVALID_ARGUMENT,
    "agreement": _Code.INVALID_ARGUMENT,
    "stale_call": _Code.FAILED_PRECONDITION,
    "lease_held": _Code.FAILED_PRECONDITION,
    "peer_refused": _Code.INVALID_ARGUMENT,
    "overloaded": _Code.RESOURCE_EXHAUSTED,
    "peer_timeout": _Code.DEADLINE_EXCEEDED,
    "draining": _Code.UNAVAILABLE,
    "unavailable": _Code.UNAVAILABLE,
    "config": _Code.FAILED_PRECONDITION,
    "ineligible": _Code.FAILED_PRECONDITION,
    "binding": _Code.INTERNAL,
    "heap": _Code.INTERNAL,
    "internal": _Code.INTERNAL,
}
"""gRPC status of every error code; moe.proto documents the same table at Error."""

ERROR_CODE_METADATA = "megamoe-error-code"
MISSING_RANKS_METADATA = "megamoe-missing-ranks"
"""Trailing metadata of unary errors: what an Error message says on a stream."""

E = TypeVar("E", bound=StrEnum)


def status_of(code: str) -> grpc.StatusCode:
    """The status of an error code; an unknown code is a bug, hence INTERNAL."""
    return STATUS_BY_CODE.get(code, _Code.INTERNAL)


def error_to_pb(error: ErrorReply) -> pb.Error:
    status: Any = status_of(error.code).value
    return pb.Error(
        code=error.code, status=status[0], message=error.message, missing_ranks=error.missing_ranks
    )


# ---------------------------------------------------------------------------------------------- enums

_PB_ENUMS: dict[type[StrEnum], tuple[Any, str]] = {
    Path: (pb.Path, "PATH_"),
    Phase: (pb.Phase, "PHASE_"),
    RowFormat: (pb.RowFormat, "ROW_FORMAT_"),
}
_TO_PB: dict[StrEnum, int] = {
    member: wire.Value(prefix + member.value) for kind, (wire, prefix) in _PB_ENUMS.items() for member in kind
}
_FROM_PB: dict[tuple[type[StrEnum], int], StrEnum] = {
    (type(member), number): member for member, number in _TO_PB.items()
}


def enum_to_pb(member: StrEnum) -> Any:
    """The wire number of a Path, Phase or RowFormat."""
    return _TO_PB[member]


def enum_from_pb(kind: type[E], number: int, field: str) -> E:
    """The member of `kind` with this wire number. Raises InvalidArgumentError naming the field."""
    member = _FROM_PB.get((kind, number))
    if member is None:
        _, prefix = _PB_ENUMS[kind]
        wanted = " or ".join(prefix + str(known) for known in kind)
        raise InvalidArgumentError(must_be(field, wanted, number))
    return member  # type: ignore[return-value]


# ---------------------------------------------------------------------------------------------- plans


def plan_id_to_pb(plan_id: PlanId) -> pb.PlanId:
    return pb.PlanId(
        generation=plan_id.generation, step_id=plan_id.step_id, micro_batch_idx=plan_id.micro_batch_idx
    )


def plan_id_from_pb(message: pb.PlanId) -> PlanId:
    return PlanId(message.generation, message.step_id, message.micro_batch_idx)


def plan_to_pb(plan: StepPlan, sub_steps: tuple[SubStep, ...]) -> pb.StepPlan:
    return pb.StepPlan(
        plan_id=plan_id_to_pb(plan.plan_id),
        num_rows_per_rank=plan.num_rows_per_rank,
        phase=enum_to_pb(plan.phase),
        dtype=plan.dtype,
        weights_version=plan.weights_version,
        placement_version=plan.placement_version,
        policy_version=plan.policy_version,
        sub_steps=[
            pb.PlannedSubStep(
                path=enum_to_pb(sub.path),
                runtime_capacity=sub.runtime_capacity,
                start_row=sub.start_row,
                stop_row=sub.stop_row,
                num_rows_per_rank=sub.num_rows_per_rank,
            )
            for sub in sub_steps
        ],
    )


def plan_from_pb(message: pb.StepPlan) -> tuple[StepPlan, tuple[SubStep, ...]]:
    plan = StepPlan(
        plan_id=plan_id_from_pb(message.plan_id),
        num_rows_per_rank=tuple(message.num_rows_per_rank),
        phase=enum_from_pb(Phase, message.phase, "phase"),
        dtype=message.dtype,
        weights_version=message.weights_version,
        placement_version=message.placement_version,
        policy_version=message.policy_version,
    )
    return plan, tuple(
        SubStep(
            sub_step_idx=idx,
            start_row=sub.start_row,
            stop_row=sub.stop_row,
            path=enum_from_pb(Path, sub.path, "path"),
            runtime_capacity=sub.runtime_capacity,
            num_rows_per_rank=tuple(sub.num_rows_per_rank),
        )
        for idx, sub in enumerate(message.sub_steps)
    )


# ---------------------------------------------------------------------------------------------- reports


def report_to_pb(report: SubStepReport) -> pb.SubStepReport:
    return pb.SubStepReport(
        path=enum_to_pb(report.path),
        runtime_capacity=report.runtime_capacity,
        num_rows_per_rank=report.num_rows_per_rank,
        row_format_per_rank=[enum_to_pb(row_format) for row_format in report.row_format_per_rank],
        counters=pb.Counters(**report.counters._asdict()),
        times=pb.StageTimes(**report.times._asdict()),
    )


def report_from_pb(message: pb.SubStepReport) -> SubStepReport:
    return SubStepReport(
        path=enum_from_pb(Path, message.path, "path"),
        runtime_capacity=message.runtime_capacity,
        num_rows_per_rank=tuple(message.num_rows_per_rank),
        row_format_per_rank=tuple(
            enum_from_pb(RowFormat, number, "row_format") for number in message.row_format_per_rank
        ),
        counters=Counters._make(getattr(message.counters, name) for name in Counters._fields),
        times=StageTimes._make(getattr(message.times, name) for name in StageTimes._fields),
    )


# ---------------------------------------------------------------------------------------------- shape, policy


def shape_to_pb(shape: MoeShape) -> pb.Shape:
    return pb.Shape(**{f.name: getattr(shape, f.name) for f in fields(MoeShape)})


def shape_from_pb(message: pb.Shape) -> MoeShape:
    return MoeShape(**{f.name: getattr(message, f.name) for f in fields(MoeShape)})


def policy_to_pb(policy: PathPolicy, built: frozenset[Path]) -> pb.Policy:
    """`built`: the paths that the bundle has a runtime for."""
    return pb.Policy(
        version=policy.version,
        enabled_paths=[enum_to_pb(path) for path in Path if path in built and policy.allows(path)],
        large_m_min_tokens=policy.large_m_min_tokens,
    )


def policy_from_pb(message: pb.Policy) -> PathPolicy:
    enabled = {enum_from_pb(Path, number, "enabled_paths") for number in message.enabled_paths}
    if Path.COMPACT not in enabled:
        raise InternalError("a policy without compact came over the wire: this is a bug")
    return PathPolicy(
        version=message.version,
        small_m_enabled=Path.SMALL_M in enabled,
        fixed_slot_enabled=Path.FIXED_SLOT in enabled,
        large_m_enabled=Path.LARGE_M in enabled,
        large_m_min_tokens=message.large_m_min_tokens,
    )
