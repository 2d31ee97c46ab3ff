"""An open step of one rank, and its layer calls.

A call that the transport finds impossible is sent all the same, as its refusal: the other ranks wait for it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megamoe import StepPlan, SubStep, SubStepReport
from megamoe.errors import InvalidArgumentError, StaleCallError
from service.client.numbers import integer
from service.client.transport import Call, Transport


class RankOutput:
    """One layer on one rank. hidden_states: [n, hidden] bf16, `out` where one was given. queue_us: in the rank's ring
    before execution; total_us: from there until the result was there. sub_steps: a report per executed piece."""

    __slots__ = ("_call", "hidden_states", "queue_us", "total_us")

    def __init__(self, hidden_states: torch.Tensor, queue_us: float, total_us: float, call: Call) -> None:
        self.hidden_states = hidden_states
        self.queue_us = queue_us
        self.total_us = total_us
        self._call = call

    @property
    def sub_steps(self) -> tuple[SubStepReport, ...]:
        return self._call.reports()


class RankStep:
    """An open plan on one rank. `plan` is what all ranks agreed on, `sub_steps` how each layer will be executed."""

    def __init__(
        self,
        plan: StepPlan,
        sub_steps: tuple[SubStep, ...],
        lease_serial: int,
        transport: Transport,
        *,
        take_sequence: Callable[[], int],
        check_usable: Callable[[], None],
        timeout_s: float,
    ) -> None:
        self.plan = plan
        self.sub_steps = sub_steps
        self.is_open = True
        self.timeout_s = timeout_s
        plan_id = plan.plan_id
        self.names = lease_serial, plan_id.generation, plan_id.step_id, plan_id.micro_batch_idx
        self._start, self._refuse = transport.start, transport.refuse
        self._take_sequence = take_sequence
        self._check_usable = check_usable

    def layer(
        self,
        layer_idx: int,
        hidden_states: torch.Tensor | None = None,
        topk_ids: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        hidden_states_sf: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
    ) -> RankOutput:
        """Run one layer: hidden_states [n, hidden] bf16 (or e4m3 codes with hidden_states_sf [n, hidden / 32] uint8),
        topk_ids [n, num_topk] int32, topk_weights [n, num_topk] fp32; nothing for a rank without rows.

        out: [n, hidden] bf16 to write into; with transport "memory" it is needed, and it and the rows lie in memory
        that `share` gave. ids and weights are always on the host. Layer indices grow within a step.
        Raises the error that all ranks answer, InvalidArgumentError for tensors of this one that are none of these
        among them; the step stays open after it. OverloadedError when as many calls are in flight as `connect` said:
        then nothing was sent.
        """
        return self.start_layer(
            layer_idx, hidden_states, topk_ids, topk_weights, hidden_states_sf, out=out
        ).result()

    def start_layer(
        self,
        layer_idx: int,
        hidden_states: torch.Tensor | None = None,
        topk_ids: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        hidden_states_sf: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
    ) -> StartedLayer:
        """`layer` without waiting: its place in the total order is taken now. Tensors must stay until `result`."""
        if not self.is_open:
            raise StaleCallError(f"step {self.plan.plan_id} is closed: layers run inside its `with`")
        self._check_usable()
        rows = hidden_states, topk_ids, topk_weights, hidden_states_sf
        take = self._take_sequence
        try:
            layer_idx = integer("layer_idx", layer_idx)
            call = self._start(self.names, layer_idx, take, rows, out, self.timeout_s)
        except InvalidArgumentError as error:
            # The others wait for this call, or have made it: they hear what is wrong with it.
            call = self._refuse(self.names, take(), error, self.timeout_s)
        return StartedLayer(call, self._check_usable)


class StartedLayer:
    """A layer call in flight. Call `result` once."""

    __slots__ = ("_call", "_check_usable")

    def __init__(self, call: Call, check_usable: Callable[[], None]) -> None:
        self._call: Call | None = call
        self._check_usable = check_usable

    def result(self) -> RankOutput:
        """Wait for it. Raises what `RankStep.layer` says."""
        call, self._call = self._call, None  # its place in the ring is another call's afterwards
        if call is None:
            raise StaleCallError("result of a layer call must be taken once, got a second time")
        self._check_usable()
        hidden_states, queue_us, total_us = call.wait()
        return RankOutput(hidden_states, queue_us, total_us, call)
