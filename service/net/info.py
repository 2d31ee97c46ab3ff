"""GetInfo's answer from the configuration, the addresses and the present state: the same on the front and all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from megamoe import Path, PathPolicy
from service.config import ServiceConfig
from service.net import codec
from service.pb import moe_pb2 as pb
from service.ring.specs import MAX_CALLS_PER_RING


@dataclass(frozen=True, kw_only=True)
class Addresses:
    """Where everything listens, host:port; ranks in rank order."""

    front: str = ""
    http: str = ""
    ranks: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()

    @classmethod
    def from_table(cls, table: dict[str, Any]) -> Addresses:
        """From what `dataclasses.asdict` and JSON made of one."""
        return cls(
            front=table["front"],
            http=table["http"],
            ranks=tuple(table["ranks"]),
            metrics=tuple(table["metrics"]),
        )


@dataclass(kw_only=True)
class State:
    """What changes while a service runs. not_ready_reason: empty = ready."""

    generation: int
    policy: PathPolicy
    addresses: Addresses = field(default_factory=Addresses)
    group_name: str = ""
    not_ready_reason: str = "starting"
    draining: bool = False


def version() -> str:
    """Version of the installed package; 0+source for a checkout on the path."""
    try:
        return metadata.version("megamoe")
    except metadata.PackageNotFoundError:
        return "0+source"


def built_paths(config: ServiceConfig) -> frozenset[Path]:
    return frozenset(spec.path for spec in config.bundle.runtimes)


def service_info(config: ServiceConfig, state: State) -> pb.ServiceInfo:
    """The message for callers."""
    deployment, bundle, where = config.deployment, config.bundle, state.addresses
    return pb.ServiceInfo(
        version=version(),
        model_name=config.label,
        profile=config.profile,
        backend=config.backend,
        shape=codec.shape_to_pb(config.moe_shape),
        generation=state.generation,
        limits=pb.Limits(
            max_tokens_per_rank=deployment.max_tokens_per_rank,
            max_step_rows=deployment.step_rows_limit,
            max_message_bytes=config.message_bytes,
            forward_step_max_bytes=config.forward_step_max_bytes,
            step_timeout_s=config.step_timeout_s,
            lease_timeout_s=config.lease_timeout_s,
            max_micro_batches=config.max_micro_batches,
            max_colocated_rings=config.max_colocated_rings,
            max_calls_per_ring=MAX_CALLS_PER_RING,
        ),
        ranks=[
            pb.RankInfo(rank=rank, address=address, metrics_address=metrics_address)
            for rank, (address, metrics_address) in enumerate(zip(where.ranks, where.metrics))
        ],
        front_address=where.front,
        runtimes=[
            pb.Runtime(path=codec.enum_to_pb(spec.path), capacity=spec.capacity) for spec in bundle.runtimes
        ],
        reasons=[
            pb.PathReason(path=codec.enum_to_pb(path), reason=reason)
            for path, reason in bundle.reasons.items()
        ],
        policy=codec.policy_to_pb(state.policy, built_paths(config)),
        combine_row_format=codec.enum_to_pb(deployment.combine_row_format),
        batch_invariant=deployment.batch_invariant,
        ready=not state.not_ready_reason,
        draining=state.draining,
        not_ready_reason=state.not_ready_reason,
    )
