"""AsyncMoeGroup: the caller group of an attention tier, one stream per rank under one lease.

Owns: the lease, the sequence of layer calls and the step ids. Several steps on different micro-batches may be open at
once; `step.layer` takes its place in the total order when it is called, before anything is awaited.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any

import torch

from megamoe import PlanId, StepPlan, SubStep, SubStepReport
from megamoe.errors import InvalidArgumentError, MegaMoeError, StaleCallError, UnavailableError, must_be
from service.client.errors import worst
from service.client.front import AsyncFront
from service.client.info import ServiceInfo
from service.client.ring_stream import RingStream
from service.client.stream import RankStream, Reply
from service.client.values import GroupOutput, Rows, add_rows, num_rows_of, phases_of
from service.net import codec, wire
from service.pb import moe_pb2 as pb

_MARGIN_S = 5.0
_CLOSE_AFTER_S = 0.05
"""A finished step is closed by the next one of its micro-batch; only if none comes this soon is CloseStep sent."""


class AsyncMoeGroup:
    """All ranks of a service, leased. Made by `connect`."""

    def __init__(
        self, front: AsyncFront, info: ServiceInfo, streams: Sequence[RankStream], holder: str
    ) -> None:
        self.front = front
        self.info = info
        self.holder = holder
        self.streams: list[RankStream | RingStream] = list(streams)
        self.lease_serial = 0
        self.generation = info.generation
        self.next_sequence = 0
        self._next_step_id = 0
        self._closing: dict[int, tuple[PlanId, asyncio.TimerHandle]] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._last_sent_s = time.monotonic()
        self._ends = asyncio.Event()

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(
        cls, front: str, *, holder: str, wait_ready_s: float = 30.0, transport: str = "grpc"
    ) -> AsyncIterator[AsyncMoeGroup]:
        """Lease all ranks of the service at `front` (host:port) for the caller group called `holder`.

        transport: how steps travel: "grpc", or "ring" through shared memory of the service's host.
        Raises UnavailableError when the service is not ready within wait_ready_s, LeaseHeldError naming the holder
        when another group has it.
        """
        if transport not in ("grpc", "ring"):
            raise InvalidArgumentError(must_be("transport", "'grpc' or 'ring'", repr(transport)))
        async with AsyncFront(front) as opened:
            info = await opened.wait_ready(wait_ready_s)
            limit = info.limits.max_message_bytes
            streams = [
                RankStream(rank, address, max_message_bytes=limit)
                for rank, address in enumerate(info.rank_addresses)
            ]
            group = cls(opened, info, streams, holder)
            keeper: asyncio.Task[None] | None = None
            try:
                await group._take_lease()
                if transport == "ring":
                    await group._open_rings()
                keeper = asyncio.create_task(group._keep_lease(), name="lease keeper")
                yield group
            finally:
                group._ends.set()
                if keeper:
                    # A request to keep the lease that is still under way could take it again after the release.
                    await keeper
                await group._close()

    # ------------------------------------------------------------------------------ lease

    async def _take_lease(self) -> None:
        request = pb.ForwardRequest(lease=pb.Lease(holder=self.holder))
        granted = [reply.message.lease_granted for reply in await self._ask_all(request, timeout_s=_MARGIN_S)]
        said = {(g.lease_serial, g.generation) for g in granted}
        if len(said) != 1:
            raise UnavailableError(f"the ranks granted different leases ({sorted(said)}): take it again")
        self.lease_serial, self.generation = said.pop()
        self.next_sequence = max(g.next_sequence for g in granted)
        self._next_step_id = max(g.next_step_id for g in granted)

    async def _open_rings(self) -> None:
        limits = self.info.limits
        for rank, stream in enumerate(self.streams):
            assert isinstance(stream, RankStream)
            self.streams[rank] = await RingStream.open(
                stream,
                self.info.shape,
                self.lease_serial,
                num_calls=limits.max_micro_batches,
                timeout_s=limits.step_timeout_s + _MARGIN_S,
            )

    async def _keep_lease(self) -> None:
        """Traffic of any kind keeps the lease; an idle caller sends a Lease now and then."""
        pause_s = self.info.limits.lease_timeout_s / 4
        while not self._ends.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ends.wait(), pause_s)
            if self._ends.is_set() or time.monotonic() - self._last_sent_s < pause_s:
                continue
            request = pb.ForwardRequest(lease=pb.Lease(holder=self.holder))
            with contextlib.suppress(MegaMoeError):  # the next step says what is wrong
                await self.streams[0].request(request, timeout_s=_MARGIN_S)

    async def _close(self) -> None:
        for _, timer in self._closing.values():
            timer.cancel()
        for task in self._background:
            task.cancel()
        if self.lease_serial:
            lease = pb.Lease(holder=self.holder, release=True, lease_serial=self.lease_serial)
            release = pb.ForwardRequest(lease=lease)
            with contextlib.suppress(MegaMoeError):
                await self._ask_all(release, timeout_s=_MARGIN_S)
        await asyncio.gather(*(stream.close() for stream in self.streams), return_exceptions=True)

    # ------------------------------------------------------------------------------ steps

    @contextlib.asynccontextmanager
    async def step(
        self,
        num_rows_per_rank: Sequence[int],
        phase: str | Sequence[str] = "decode",
        micro_batch_idx: int = 0,
        *,
        dtype: str = "bfloat16",
        announce_counts: bool = True,
        timeout_s: float | None = None,
    ) -> AsyncIterator[AsyncStep]:
        """Agree on one plan for all layers of a step.

        num_rows_per_rank: rows of every rank. phase: "prefill" or "decode", for all or per rank. dtype: "bfloat16",
        or "mxfp8" for rows with scales. announce_counts: tell every rank the whole vector, so that ranks without rows
        need no layer calls; without it they are all called.
        Raises the error that the ranks agreed on; nothing is open then.
        """
        counts = list(num_rows_per_rank)
        if len(counts) != self.info.num_ranks:
            raise InvalidArgumentError(
                must_be("num_rows_per_rank", f"{self.info.num_ranks} numbers, one per rank", counts)
            )
        phases = phases_of(phase, counts)
        plan_id = PlanId(self.generation, self._next_step_id, micro_batch_idx)
        self._next_step_id += 1
        superseded = self._closing.pop(micro_batch_idx, None)
        if superseded:
            superseded[1].cancel()
        timeout = timeout_s or self.info.limits.step_timeout_s
        # Ranks without rows need not be called when the others are told the whole vector.
        called = [rank for rank, rows in enumerate(counts) if rows or not announce_counts] or [0]
        calls = []
        for rank in called:
            intent = pb.StepIntent(
                lease_serial=self.lease_serial,
                plan_id=codec.plan_id_to_pb(plan_id),
                num_rows=counts[rank],
                phase=codec.enum_to_pb(phases[rank]),
                dtype=dtype,
                num_rows_per_rank=counts if announce_counts else [],
                timeout_s=timeout_s or 0.0,
            )
            request = pb.ForwardRequest(step_intent=intent)
            calls.append(self.streams[rank].request(request, timeout_s=timeout + _MARGIN_S))
        replies = await self._all(calls)
        plan, sub_steps = codec.plan_from_pb(replies[0].message.step_plan)
        step = AsyncStep(self, plan, sub_steps, announce_counts, timeout)
        try:
            yield step
        finally:
            step.open = False
            timer = asyncio.get_running_loop().call_later(_CLOSE_AFTER_S, self._close_step, plan_id)
            self._closing[micro_batch_idx] = (plan_id, timer)

    def _close_step(self, plan_id: PlanId) -> None:
        self._closing.pop(plan_id.micro_batch_idx, None)
        message = pb.CloseStep(lease_serial=self.lease_serial, plan_id=codec.plan_id_to_pb(plan_id))
        task = asyncio.create_task(self._ask_all(pb.ForwardRequest(close_step=message), timeout_s=_MARGIN_S))
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    # ------------------------------------------------------------------------------ exchanges

    async def _ask_all(self, request: pb.ForwardRequest, *, timeout_s: float) -> list[Reply]:
        """The same small request to every rank."""
        calls = []
        for stream in self.streams:
            own = pb.ForwardRequest()
            own.CopyFrom(request)
            calls.append(stream.request(own, timeout_s=timeout_s))
        return await self._all(calls)

    async def _all(self, calls: Sequence[Awaitable[Reply]]) -> list[Reply]:
        """All replies, or the most telling of the errors once every rank has answered."""
        self._last_sent_s = time.monotonic()
        results = await asyncio.gather(*calls, return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            raise worst(errors) if all(isinstance(e, MegaMoeError) for e in errors) else errors[0]  # type: ignore[arg-type]
        return results  # type: ignore[return-value]


class AsyncStep:
    """An open plan. `plan` is what all ranks agreed on, `sub_steps` how each layer will be executed."""

    def __init__(
        self,
        group: AsyncMoeGroup,
        plan: StepPlan,
        sub_steps: tuple[SubStep, ...],
        announced: bool,
        timeout_s: float,
    ) -> None:
        self.plan = plan
        self.sub_steps = sub_steps
        self.open = True
        self._group = group
        self._announced = announced
        self._timeout_s = timeout_s

    async def layer(
        self, layer_idx: int, batches: Sequence[Rows], *, sequence: int | None = None
    ) -> GroupOutput:
        """Run one layer on all ranks: `batches` has one entry per rank, with as many rows as the plan says.

        sequence: place in the total order; by default the next one. Layer indices grow within a step.
        Raises the error that the ranks answer, the same for all; the step stays open after a refusal.
        """
        group, plan = self._group, self.plan
        if not self.open:
            raise StaleCallError(f"step {plan.plan_id} is closed: layers run inside its `async with`")
        if len(batches) != plan.num_ranks:
            raise InvalidArgumentError(must_be("batches", f"{plan.num_ranks} entries", len(batches)))
        called = [
            rank
            for rank, rows in enumerate(batches)
            if plan.num_rows_per_rank[rank] or num_rows_of(rows) or not self._announced
        ] or [0]
        envelopes = {rank: self._envelope(layer_idx, batches[rank]) for rank in called}
        if sequence is None:
            sequence = group.next_sequence
            group.next_sequence += 1
        calls = []
        for rank, (message, parts) in envelopes.items():
            message.layer_call.sequence = sequence
            stream = group.streams[rank]
            calls.append(stream.request(message, parts, timeout_s=2 * self._timeout_s + _MARGIN_S))
        replies = dict(zip(called, await group._all(calls)))
        hidden: list[torch.Tensor] = []
        reports: list[tuple[SubStepReport, ...]] = []
        for rank in range(plan.num_ranks):
            reply = replies.get(rank)
            if reply is None:
                hidden.append(torch.empty((0, group.info.shape.hidden), dtype=torch.bfloat16))
                reports.append(())
                continue
            result = reply.message.layer_result
            hidden.append(wire.named(result.tensors, reply.payload, "hidden_states"))
            reports.append(tuple(codec.report_from_pb(report) for report in result.sub_steps))
        return GroupOutput(plan, layer_idx, tuple(hidden), tuple(reports))

    def _envelope(self, layer_idx: int, rows: Rows) -> tuple[pb.ForwardRequest, tuple[wire.Buffer, ...]]:
        writer = wire.PayloadWriter()
        call = pb.LayerCall(
            lease_serial=self._group.lease_serial,
            plan_id=codec.plan_id_to_pb(self.plan.plan_id),
            layer_idx=layer_idx,
            tensors=add_rows(writer, rows),
        )
        limit = self._group.info.limits.max_message_bytes
        if writer.num_bytes > limit - 4096:
            raise InvalidArgumentError(
                must_be(
                    f"rows of layer {layer_idx}",
                    f"at most max_message_bytes = {limit} of the service in one message (cut the step, or raise it)",
                    f"{writer.num_bytes} bytes",
                )
            )
        return pb.ForwardRequest(layer_call=call), tuple(writer.parts)
