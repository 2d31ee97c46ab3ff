"""The front: GetInfo, ForwardStep and Admin as plain calls."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import torch

from megamoe import Path, PathPolicy, Phase
from megamoe.errors import InvalidArgumentError, UnavailableError, must_be
from service.client.errors import from_rpc
from service.client.info import ServiceInfo, info_from_pb
from service.client.stream import channel_options
from service.client.values import GroupOutput, Rows, add_rows, num_rows_of, phases_of
from service.net import codec, wire
from service.pb import moe_pb2 as pb
from service.pb.moe_pb2_grpc import AdminStub, MoELayerStub

_MARGIN_S = 5.0
"""How much longer than the service's own timeouts a client waits before it gives up on a call."""


class AsyncFront:
    """A channel to the front. Use `async with`, or `close`."""

    def __init__(self, address: str, *, max_message_bytes: int = -1) -> None:
        """Raises InvalidArgumentError for what is no address; whether anybody is there shows at the first call."""
        host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
        # gRPC takes 99999 for 34463, and waits for hosts without a port on one that nobody named.
        if not host.strip(": ") or not (port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
            raise InvalidArgumentError(must_be("address of the front", "host:port", repr(address)))
        self.address = address
        self._channel = grpc.aio.insecure_channel(address, options=channel_options(max_message_bytes))
        self._layer: Any = MoELayerStub(self._channel)
        self._admin: Any = AdminStub(self._channel)
        self._forward_step: Any = self._channel.unary_unary(
            "/megamoe.v1.MoELayer/ForwardStep",
            request_serializer=wire.serialize,
            response_deserializer=wire.deserializer(pb.ForwardStepReply),
        )
        self._info: ServiceInfo | None = None

    async def __aenter__(self) -> AsyncFront:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close(None)

    async def info(self, *, timeout_s: float = _MARGIN_S) -> ServiceInfo:
        """What runs there now. Raises UnavailableError when nobody answers."""
        reply = await self._call(self._layer.GetInfo, pb.GetInfoRequest(), timeout_s)
        self._info = info_from_pb(reply)
        return self._info

    async def wait_ready(self, timeout_s: float) -> ServiceInfo:
        """GetInfo of a service whose steps make progress. Raises UnavailableError with its reason otherwise."""
        deadline = time.monotonic() + timeout_s
        reason = "no answer"
        while True:
            try:
                info = await self.info()
                if info.ready:
                    return info
                reason = info.not_ready_reason
            except UnavailableError as error:
                reason = str(error)
            if time.monotonic() >= deadline:
                raise UnavailableError(f"{self.address} is not ready after {timeout_s} s: {reason}")
            await asyncio.sleep(0.1)

    async def forward_step(
        self,
        layer_idx: int,
        batches: Sequence[Rows],
        phase: str | Sequence[str] = "decode",
        *,
        timeout_s: float | None = None,
    ) -> GroupOutput:
        """All ranks' rows of one layer in one message. `batches`: one entry per rank; needs no lease.

        Raises the service's error; InvalidArgumentError naming Forward when the message is too large for this call.
        """
        info = self._info or await self.info()
        counts = [num_rows_of(rows) for rows in batches]
        phases = phases_of(phase, counts)
        writer = wire.PayloadWriter()
        request = pb.ForwardStepRequest(layer_idx=layer_idx, timeout_s=timeout_s or 0.0)
        for rank, rows in enumerate(batches):
            if rows is not None:
                number = (
                    pb.PHASE_UNSPECIFIED if phases[rank] is Phase.IDLE else codec.enum_to_pb(phases[rank])
                )
                request.ranks.add(rank=rank, phase=number, tensors=add_rows(writer, rows))
        wait_s = (timeout_s or info.limits.step_timeout_s) * 2 + _MARGIN_S
        envelope = await self._call(self._forward_step, wire.Envelope(request, tuple(writer.parts)), wait_s)
        return output_of_step(envelope, info)

    async def policy(self) -> PathPolicy:
        """The newest staged policy."""
        reply = await self._call(self._admin.GetPolicy, pb.GetPolicyRequest(), _MARGIN_S)
        return codec.policy_from_pb(reply)

    async def set_path_enabled(self, path: Path | str, enabled: bool) -> PathPolicy:
        """Switch a built path; it takes effect on all ranks at one agreed step. Returns the new policy."""
        try:
            number = codec.enum_to_pb(Path(path))
        except ValueError as error:
            raise InvalidArgumentError(must_be("path", f"one of {', '.join(Path)}", repr(path))) from error
        request = pb.SetPathEnabledRequest(path=number, enabled=enabled)
        return codec.policy_from_pb(await self._call(self._admin.SetPathEnabled, request, 2 * _MARGIN_S))

    async def drain(self, *, resume: bool = False) -> bool:
        """Take no new plans from now on (or take them again). Returns whether the service drains."""
        reply = await self._call(self._admin.Drain, pb.DrainRequest(resume=resume), 2 * _MARGIN_S)
        return bool(reply.draining)

    async def _call(self, method: Any, request: Any, timeout_s: float) -> Any:
        try:
            return await method(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, where=f"front {self.address}") from error


def output_of_step(envelope: wire.Envelope[pb.ForwardStepReply], info: ServiceInfo) -> GroupOutput:
    """The reply of ForwardStep as values."""
    message = envelope.message
    plan, _ = codec.plan_from_pb(message.plan)
    hidden = [torch.empty((0, info.shape.hidden), dtype=torch.bfloat16)] * info.num_ranks
    reports: list[tuple[Any, ...]] = [()] * info.num_ranks
    layer_idx = 0
    for item in message.ranks:
        result = item.result
        layer_idx = result.layer_idx
        hidden[item.rank] = wire.named(result.tensors, envelope.payload, "hidden_states")
        reports[item.rank] = tuple(codec.report_from_pb(report) for report in result.sub_steps)
    return GroupOutput(plan, layer_idx, tuple(hidden), tuple(reports))


@contextlib.asynccontextmanager
async def _front_of(front: str | AsyncFront) -> AsyncIterator[AsyncFront]:
    if isinstance(front, AsyncFront):
        yield front
        return
    async with AsyncFront(front) as opened:
        yield opened


async def forward_step(
    front: str | AsyncFront,
    layer_idx: int,
    batches: Sequence[Rows],
    phase: str | Sequence[str] = "decode",
    *,
    timeout_s: float | None = None,
) -> GroupOutput:
    """One layer of one step with one unary call; `front` is an address or an open AsyncFront (cheaper to repeat)."""
    async with _front_of(front) as opened:
        return await opened.forward_step(layer_idx, batches, phase, timeout_s=timeout_s)
