"""Which request rings a rank has, and how large each is: the one place that both sides derive them from."""

from __future__ import annotations

from service.config import ServiceConfig
from service.ring.layout import RingSpec

SERVICER_RING = 0
"""The rank's own gRPC servicer."""
FRONT_RING = 1
"""The front: one ForwardStep at a time, and Admin."""
FIRST_COLOCATED_RING = 2
"""From here on: callers on this host, made when they ask."""
MAX_CALLS_PER_RING = 64
"""Layer calls in flight that such a caller may ask for."""


def ring_specs(config: ServiceConfig) -> tuple[RingSpec, RingSpec]:
    """The rings of one rank, by ring index. The front's holds one ForwardStep, whose size is capped."""
    limit = config.deployment.step_rows_limit
    front_rows = max(min(config.forward_step_max_bytes // config.row_bytes, limit), 1)
    slots = config.ring_slots
    return (
        RingSpec.of(config.deployment, num_control_slots=slots),
        RingSpec.of(config.deployment, max_rows=front_rows, num_control_slots=slots, num_bulk_calls=1),
    )
