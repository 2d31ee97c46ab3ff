"""The front: the one address of a service. GetInfo, ForwardStep and Admin over gRPC; /sd, /healthz, /readyz over HTTP.

Owns: the state that GetInfo tells and the servers of the supervisor's process, which outlive the ranks. While no group
is up, calls that need one end with UNAVAILABLE and the reason.
"""

from __future__ import annotations

import asyncio
import json
from http.server import BaseHTTPRequestHandler
from typing import Any

import grpc

from megamoe import MoeBatch, Path, Phase, check_switch
from megamoe.errors import (
    ConfigError,
    InvalidArgumentError,
    UnavailableError,
    must_be,
)
from service.config import ServiceConfig
from service.front.group import FrontGroup, StepDone, StepJob
from service.net import codec, wire
from service.net.grpc_server import (
    ADMIN_SERVICE,
    LAYER_SERVICE,
    Health,
    check_free,
    elsewhere,
    listen,
    make_server,
    unary,
)
from service.net.http_server import HttpServer
from service.net.info import State, built_paths, service_info
from service.pb import moe_pb2 as pb
from service.rank.requests import layer_result

StepIn = wire.Envelope[pb.ForwardStepRequest]


class Front:
    """The servers. `group` is the incarnation that is up, or None."""

    def __init__(self, config: ServiceConfig, state: State) -> None:
        self.config = config
        self.state = state
        self.group: FrontGroup | None = None
        self._server: grpc.aio.Server | None = None
        self._health: Health | None = None
        self._http: HttpServer | None = None

    def start_http(self) -> int:
        """Answer probes; returns the port. Raises ConfigError when it, or the gRPC port, is taken."""
        # What starts between this and the gRPC server may take a minute: say it now.
        check_free(self.config.host, self.config.port, "port")
        return self._start_http()

    async def start(self) -> int:
        """Listen for calls; returns the gRPC port. Raises ConfigError when it is taken."""
        config = self.config
        # Above the cap, so that a message that is too large meets our refusal and not only gRPC's.
        receive = min(4 * config.forward_step_max_bytes, 2**31 - 1)
        server, health = make_server(
            {LAYER_SERVICE: self._layer_handlers(), ADMIN_SERVICE: self._admin_handlers()},
            max_receive_bytes=receive,
            max_send_bytes=receive,
        )
        port = listen(server, config.host, config.port, "port")
        self._server, self._health = server, health
        await health.set(False)
        await server.start()
        return port

    async def set_ready(self, not_ready_reason: str) -> None:
        """Ready with an empty reason."""
        self.state.not_ready_reason = not_ready_reason
        if self._health:
            await self._health.set(not not_ready_reason and not self.state.draining)

    async def stop(self) -> None:
        if self._server:
            await self._server.stop(1.0)
        if self._http:
            self._http.close()

    # ------------------------------------------------------------------------------ MoELayer

    def _layer_handlers(self) -> dict[str, Any]:
        return {
            "GetInfo": unary(self.get_info, pb.GetInfoRequest, pb.ServiceInfo.SerializeToString),
            "ForwardStep": unary(
                self.forward_step,
                pb.ForwardStepRequest,
                bytes,
                deserialize=_sized(wire.deserializer(pb.ForwardStepRequest)),
            ),
            "Forward": elsewhere(
                grpc.stream_stream_rpc_method_handler,
                "Forward streams go to the ranks, not to the front: GetInfo names their addresses",
            ),
        }

    async def get_info(self, request: pb.GetInfoRequest) -> pb.ServiceInfo:
        return service_info(self.config, self.state)

    async def forward_step(self, request: tuple[int, StepIn]) -> bytes:
        """Returns the serialized ForwardStepReply: its rows are taken out of the rings only once."""
        num_bytes, envelope = request
        self._refuse_large(num_bytes)
        job, hidden = read_job(self.config, envelope), self.config.moe_shape.hidden
        future = self._group().forward_step(job, lambda done: serialize_done(done, job.layer_idx, hidden))
        return await asyncio.wrap_future(future)

    def _refuse_large(self, num_bytes: int) -> None:
        limit = self.config.forward_step_max_bytes
        if num_bytes > limit:
            raise InvalidArgumentError(
                must_be(
                    "ForwardStep message",
                    f"at most forward_step_max_bytes = {limit} bytes (use one Forward stream per rank)",
                    num_bytes,
                )
            )

    def _group(self) -> FrontGroup:
        if self.group is None:
            raise UnavailableError(f"no group is up: {self.state.not_ready_reason or 'stopping'}")
        return self.group

    # ------------------------------------------------------------------------------ Admin

    def _admin_handlers(self) -> dict[str, Any]:
        return {
            "SetPathEnabled": unary(
                self.set_path_enabled, pb.SetPathEnabledRequest, pb.Policy.SerializeToString
            ),
            "GetPolicy": unary(self.get_policy, pb.GetPolicyRequest, pb.Policy.SerializeToString),
            "Drain": unary(self.drain, pb.DrainRequest, pb.DrainReply.SerializeToString),
        }

    async def set_path_enabled(self, request: pb.SetPathEnabledRequest) -> pb.Policy:
        path = codec.enum_from_pb(Path, request.path, "path")
        if path not in built_paths(self.config):
            raise ConfigError(f"path {path} is not built: {self.config.bundle.reasons[path]}")
        if request.enabled:
            await asyncio.to_thread(check_switch, self.config.bundle, path)
        group = self._group()
        policy = self.state.policy.with_path(path, request.enabled)
        self.state.policy = policy  # taken now: of two callers at once each gets a version of its own
        await asyncio.to_thread(group.stage_policy, policy)
        return codec.policy_to_pb(policy, built_paths(self.config))

    async def get_policy(self, request: pb.GetPolicyRequest) -> pb.Policy:
        return codec.policy_to_pb(self.state.policy, built_paths(self.config))

    async def drain(self, request: pb.DrainRequest) -> pb.DrainReply:
        await asyncio.to_thread(self._group().drain, not request.resume)
        self.state.draining = not request.resume
        await self.set_ready(self.state.not_ready_reason)
        return pb.DrainReply(draining=self.state.draining)

    # ------------------------------------------------------------------------------ HTTP

    def _start_http(self) -> int:
        front = self

        class Handler(BaseHTTPRequestHandler):
            """GET only."""

            def do_GET(self) -> None:
                status, content_type, body = front.http_answer(self.path)
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                """Probes come every few seconds: not logged."""

        try:
            self._http = HttpServer(self.config.host, self.config.http_port, Handler, "front http")
        except OSError as error:
            where = f"http_port {self.config.host}:{self.config.http_port}"
            raise ConfigError(f"{where} must be free to listen on, got: {error.strerror}") from error
        return int(self._http.start().server_port)

    def http_answer(self, path: str) -> tuple[int, str, bytes]:
        """(status, content type, body) of a GET. /healthz: this process answers; /readyz: steps make progress."""
        plain = "text/plain; charset=utf-8"
        state = self.state
        route = path.split("?")[0].rstrip("/")
        if route == "/sd":
            targets = [{"targets": list(state.addresses.metrics), "labels": {"profile": self.config.profile}}]
            return 200, "application/json", json.dumps(targets).encode()
        if route == "/healthz":
            return 200, plain, b"ok\n"
        if route == "/readyz":
            reason = state.not_ready_reason or ("draining" if state.draining else "")
            return (503, plain, f"{reason}\n".encode()) if reason else (200, plain, b"ready\n")
        return 404, plain, b"/sd, /healthz or /readyz\n"


def _sized(deserialize: Any) -> Any:
    """The size of the wire message beside its value."""
    return lambda data: (len(data), deserialize(data))


def read_job(config: ServiceConfig, envelope: StepIn) -> StepJob:
    """The values of a ForwardStepRequest. Raises InvalidArgumentError naming field (with its rank), wanted, got."""
    shape = config.moe_shape
    batches = [MoeBatch.empty(shape)] * shape.num_ranks
    phases = [Phase.IDLE] * shape.num_ranks
    seen: set[int] = set()
    for item in envelope.message.ranks:
        if item.rank >= shape.num_ranks or item.rank in seen:
            wanted = f"each of 0 to {shape.num_ranks - 1} at most once"
            raise InvalidArgumentError(must_be("ranks[].rank", wanted, item.rank))
        seen.add(item.rank)
        try:
            batch = wire.read_batch(shape, item.tensors, envelope.payload)
            if item.phase != pb.PHASE_UNSPECIFIED and batch.num_rows:
                phase = codec.enum_from_pb(Phase, item.phase, "phase")
            else:
                phase = Phase.DECODE
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"rank {item.rank}: {error}") from error
        batches[item.rank] = batch
        phases[item.rank] = phase if batch.num_rows else Phase.IDLE
    dtypes = {b.hidden_states_sf is None for b in batches if b.num_rows}
    if len(dtypes) > 1:
        raise InvalidArgumentError(must_be("dtype", "equal on all ranks with rows", "bfloat16 and mxfp8"))
    timeout_s = envelope.message.timeout_s or config.step_timeout_s
    if not timeout_s >= 0:
        raise InvalidArgumentError(must_be("timeout_s", "a number of at least 0", timeout_s))
    return StepJob(
        layer_idx=envelope.message.layer_idx,
        batches=tuple(batches),
        phases=tuple(phases),
        timeout_s=min(timeout_s, config.step_timeout_s),
    )


def serialize_done(done: StepDone, layer_idx: int, hidden: int) -> bytes:
    """The wire bytes of a ForwardStepReply; called while the rows are still in the rings."""
    writer = wire.PayloadWriter()
    reply = pb.ForwardStepReply(plan=codec.plan_to_pb(done.plan, done.sub_steps))
    plan_id = reply.plan.plan_id
    for rank, value in enumerate(done.replies):
        if value is None:
            result = pb.LayerResult(plan_id=plan_id, layer_idx=layer_idx, sequence=done.sequence)
            result.tensors.add(name="hidden_states", dtype="bfloat16", shape=[0, hidden])
        else:
            result, _ = layer_result(value, plan_id, layer_idx, done.sequence, writer)
        reply.ranks.add(rank=rank, result=result)
    return wire.serialize(wire.Envelope(reply, tuple(writer.parts)))
