"""What a service says of itself: GetInfo as values."""

from __future__ import annotations

from dataclasses import dataclass

from megamoe import MoeShape, Path, PathPolicy, RowFormat
from service.net import codec
from service.pb import moe_pb2 as pb


@dataclass(frozen=True, kw_only=True)
class Limits:
    """max_tokens_per_rank: rows of one piece of a step. max_step_rows: rows of one rank in one step. Bytes: largest
    messages of a Forward stream and of ForwardStep. max_colocated_rings: callers on its host that may have a ring of a
    rank; max_calls_per_ring: layer calls in flight that one may have."""

    max_tokens_per_rank: int
    max_step_rows: int
    max_message_bytes: int
    forward_step_max_bytes: int
    step_timeout_s: float
    lease_timeout_s: float
    max_micro_batches: int
    max_colocated_rings: int
    max_calls_per_ring: int


@dataclass(frozen=True, kw_only=True)
class ServiceInfo:
    """Facts of a running service. runtimes: capacities (tokens a rank) of every built path; reasons: why a path is
    not built."""

    version: str
    model_name: str
    profile: str
    backend: str
    shape: MoeShape
    generation: int
    limits: Limits
    front_address: str
    rank_addresses: tuple[str, ...]
    metrics_addresses: tuple[str, ...]
    runtimes: dict[Path, tuple[int, ...]]
    reasons: dict[Path, str]
    policy: PathPolicy
    combine_row_format: RowFormat
    batch_invariant: bool
    ready: bool
    draining: bool
    not_ready_reason: str

    @property
    def num_layers(self) -> int:
        return self.shape.num_layers

    @property
    def num_ranks(self) -> int:
        return self.shape.num_ranks


def info_from_pb(message: pb.ServiceInfo) -> ServiceInfo:
    runtimes: dict[Path, tuple[int, ...]] = {}
    for runtime in message.runtimes:
        path = codec.enum_from_pb(Path, runtime.path, "runtimes.path")
        runtimes[path] = tuple(sorted((*runtimes.get(path, ()), runtime.capacity)))
    limits = message.limits
    return ServiceInfo(
        version=message.version,
        model_name=message.model_name,
        profile=message.profile,
        backend=message.backend,
        shape=codec.shape_from_pb(message.shape),
        generation=message.generation,
        limits=Limits(
            max_tokens_per_rank=limits.max_tokens_per_rank,
            max_step_rows=limits.max_step_rows,
            max_message_bytes=limits.max_message_bytes,
            forward_step_max_bytes=limits.forward_step_max_bytes,
            step_timeout_s=limits.step_timeout_s,
            lease_timeout_s=limits.lease_timeout_s,
            max_micro_batches=limits.max_micro_batches,
            max_colocated_rings=limits.max_colocated_rings,
            max_calls_per_ring=limits.max_calls_per_ring,
        ),
        front_address=message.front_address,
        rank_addresses=tuple(rank.address for rank in message.ranks),
        metrics_addresses=tuple(rank.metrics_address for rank in message.ranks),
        runtimes=runtimes,
        reasons={
            codec.enum_from_pb(Path, item.path, "reasons.path"): item.reason for item in message.reasons
        },
        policy=codec.policy_from_pb(message.policy),
        combine_row_format=codec.enum_from_pb(RowFormat, message.combine_row_format, "combine_row_format"),
        batch_invariant=message.batch_invariant,
        ready=message.ready,
        draining=message.draining,
        not_ready_reason=message.not_ready_reason,
    )
