"""What a transport of MoeRank is: how one rank's intents and layer calls travel, and the link that they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from megamoe import MemoryKind, PlanId, SharedMemory, StepPlan, SubStep, SubStepReport
from megamoe.errors import InvalidArgumentError
from service.client.blocking import Loop
from service.client.info import ServiceInfo
from service.client.stream import RankStream, Reply
from service.messages import IntentRequest
from service.pb import moe_pb2 as pb

MARGIN_S = 5.0
"""How much longer than the service's own timeouts a client waits before it gives up on a request."""

Tensors = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""hidden_states, topk_ids, topk_weights, hidden_states_sf of one rank; None for what is not there."""
Names = tuple[int, int, int, int]
"""lease, generation, step, micro-batch of a layer call."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """The leased stream to one rank, and the thread that it lives on."""

    info: ServiceInfo
    rank: int
    lease_serial: int
    stream: RankStream
    loop: Loop

    def ask(self, request: pb.ForwardRequest, timeout_s: float = MARGIN_S) -> Reply:
        """One request and its reply, blocking. Raises the error that the rank answers."""
        return self.loop.submit(lambda: self.stream.request(request, timeout_s=timeout_s)).result()


class Call(Protocol):
    """A layer call in flight."""

    def wait(self) -> tuple[torch.Tensor, float, float]:
        """(result rows, queue_us, total_us), once. Raises the error that all ranks answer."""

    def reports(self) -> tuple[SubStepReport, ...]:
        """What was executed, after `wait`."""


class Transport(Protocol):
    """One way to a rank. memory_kinds: of memory that `lend` takes; () where it takes none."""

    memory_kinds: tuple[MemoryKind, ...]

    def agree(self, request: IntentRequest, wait_s: float) -> tuple[StepPlan, tuple[SubStep, ...]]:
        """Bring an intent; returns the plan. Raises the error that all ranks answer."""

    def start(
        self,
        names: Names,
        layer_idx: int,
        take_sequence: Callable[[], int],
        tensors: Tensors,
        out: torch.Tensor | None,
        wait_s: float,
    ) -> Call:
        """Send a layer call. Raises InvalidArgumentError (what is given is no call) and OverloadedError (as many are in
        flight as can be) before it takes a sequence."""

    def refuse(self, names: Names, sequence: int, error: InvalidArgumentError, wait_s: float) -> Call:
        """Send a layer call that cannot be: all ranks answer this error for it, so that none waits for it."""

    def close_step(self, lease_serial: int, plan_id: PlanId) -> None:
        """Say that a plan is done with; waits for nothing."""

    def lend(self, memory: SharedMemory) -> None:
        """Let layer calls name tensors in this memory."""

    def take_back(self, memory: SharedMemory) -> None:
        """Returns when the rank has let go of it."""

    def close(self) -> None:
        """Let go of what is this transport's own. Safe to call twice."""
