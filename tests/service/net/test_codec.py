"""Values survive the wire; every error class has a status, and the contract documents the same one."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path as FilePath

import pytest

from megamoe import (
    PRESETS,
    Counters,
    Deployment,
    MoeShape,
    Path,
    PathPolicy,
    Phase,
    PlanId,
    RowFormat,
    StageTimes,
    StepPlan,
    SubStepReport,
    choose_path,
    plan_bundle,
    preset,
)
from megamoe.errors import (
    ERROR_BY_CODE,
    InvalidArgumentError,
    PeerRefusedError,
    PeerTimeoutError,
    ranks_of,
)
from service.client import RemoteError
from service.client.errors import from_message
from service.messages import ErrorReply
from service.net import codec
from service.pb import moe_pb2 as pb

PROTO = FilePath(__file__).parents[3] / "proto" / "megamoe" / "v1" / "moe.proto"


def test_every_error_class_has_a_status() -> None:
    assert set(codec.STATUS_BY_CODE) == set(ERROR_BY_CODE)


def test_the_contract_documents_the_same_table() -> None:
    text = PROTO.read_text().split("// A refused or failed request.")[1].split("message Error")[0]
    rows = re.findall(r"^//   ([a-z_, ]+?) +([A-Z_]+)  ", text, flags=re.MULTILINE)
    said = {code: status for codes, status in rows for code in codes.split(", ")}
    assert said == {code: status.name for code, status in codec.STATUS_BY_CODE.items()}


@pytest.mark.parametrize("code", sorted(ERROR_BY_CODE))
def test_errors_come_back_as_their_class(code: str) -> None:
    error = ERROR_BY_CODE[code]("rank must be there, got gone", *[(3, 5)] * code.startswith("peer_"))
    said = codec.error_to_pb(ErrorReply.of(error))
    assert pb.Error.FromString(said.SerializeToString()) == said
    back = from_message(said, 2)
    assert isinstance(back, RemoteError)
    assert isinstance(back, ERROR_BY_CODE[code])
    assert (back.status, back.rank) == (codec.status_of(code), 2)
    same = ErrorReply.of(back).exception()
    assert (type(same), str(same), ranks_of(same)) == (type(error), str(error), ranks_of(error))
    assert str(back) == str(error)
    if isinstance(back, PeerTimeoutError):
        assert back.missing_ranks == (3, 5)
    if isinstance(back, PeerRefusedError):
        assert back.refusing_ranks == (3, 5)


def test_enums_are_spelled_as_everywhere_else() -> None:
    for member in (*Path, *Phase, *RowFormat):
        prefix = {Path: "PATH_", Phase: "PHASE_", RowFormat: "ROW_FORMAT_"}[type(member)]
        kind = {Path: pb.Path, Phase: pb.Phase, RowFormat: pb.RowFormat}[type(member)]
        assert kind.Name(codec.enum_to_pb(member)) == prefix + member.value
        assert codec.enum_from_pb(type(member), codec.enum_to_pb(member), "x") is member


def test_unknown_enum_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="path must be PATH_small_m or .*, got 9"):
        codec.enum_from_pb(Path, 9, "path")


@pytest.mark.parametrize("shape", PRESETS.values(), ids=PRESETS)
def test_shapes(shape: MoeShape) -> None:
    assert codec.shape_from_pb(codec.shape_to_pb(shape)) == shape


def test_plans_reports_and_policies() -> None:
    deployment = Deployment(shape=preset("demo"), max_tokens_per_rank=64, small_m_capacities=(16,))
    bundle = plan_bundle(deployment)
    plan = StepPlan(
        plan_id=PlanId(3, 1 << 40, 1),
        num_rows_per_rank=(0, 100, 1, 0, 0, 7, 0, 64),
        phase=Phase.PREFILL,
        dtype="mxfp8",
        weights_version=2,
        placement_version=0,
        policy_version=0,
    )
    sub_steps = choose_path(plan, bundle, PathPolicy.of(deployment))
    assert len(sub_steps) == 2
    assert codec.plan_from_pb(codec.plan_to_pb(plan, sub_steps)) == (plan, sub_steps)

    report = SubStepReport(
        path=Path.LARGE_M,
        runtime_capacity=512,
        num_rows_per_rank=plan.num_rows_per_rank,
        row_format_per_rank=(RowFormat.FP8, RowFormat.BF16) * 4,
        counters=Counters(count_exchanges=1, bytes_sent=1 << 33, rows_received=9),
        times=StageTimes(gemm1_us=12.5, total_us=99.0),
    )
    assert codec.report_from_pb(codec.report_to_pb(report)) == report

    policy = replace(PathPolicy.of(deployment), small_m_enabled=True, large_m_min_tokens=77, version=4)
    assert codec.policy_from_pb(codec.policy_to_pb(policy, frozenset(Path))) == policy
    only_built = codec.policy_to_pb(policy, frozenset({Path.COMPACT, Path.SMALL_M}))
    assert list(only_built.enabled_paths) == [pb.PATH_small_m, pb.PATH_compact]
