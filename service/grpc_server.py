"""What every gRPC server of this product has: limits, keepalive manners, health and reflection.

Owns: the channel options and the health servicer. Message limits come from one number; keepalive pings are taken as
often as a client sends them (a strict server answers GOAWAY too_many_pings and the caller loses its streams).
"""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health as _health_module
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from megamoe.errors import ConfigError, MegaMoeError, must_be
from service import codec
from service.pb import moe_pb2 as pb

_health: Any = _health_module
LAYER_SERVICE = pb.DESCRIPTOR.services_by_name["MoELayer"].full_name
ADMIN_SERVICE = pb.DESCRIPTOR.services_by_name["Admin"].full_name
MAX_CONCURRENT_RPCS = 256
"""More streams and calls than this on one server are refused with RESOURCE_EXHAUSTED by gRPC itself."""


class Health:
    """grpc.health.v1 for the server as a whole ("") and for each of its services."""

    def __init__(self, services: tuple[str, ...]) -> None:
        self.servicer: Any = _health.aio.HealthServicer()
        self._names = ("", *services)
        self._serving: bool | None = None

    async def set(self, serving: bool) -> None:
        if serving is self._serving:
            return
        self._serving = serving
        status = health_pb2.HealthCheckResponse.SERVING
        if not serving:
            status = health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self.servicer.set(name, status)


def make_server(
    handlers: dict[str, dict[str, Any]], *, max_receive_bytes: int, max_send_bytes: int
) -> tuple[grpc.aio.Server, Health]:
    """A server for `handlers` ({service: {method: rpc method handler}}), with health and reflection."""
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", max_receive_bytes),
            ("grpc.max_send_message_length", max_send_bytes),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 0),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 0),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.so_reuseport", 0),
        ],
        maximum_concurrent_rpcs=MAX_CONCURRENT_RPCS,
    )
    state = Health(tuple(handlers))
    for service, methods in handlers.items():
        generic = grpc.method_handlers_generic_handler(service, methods)
        server.add_generic_rpc_handlers((generic,))
    health_pb2_grpc.add_HealthServicer_to_server(state.servicer, server)
    names = (*handlers, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    return server, state


def listen(server: grpc.aio.Server, host: str, port: int, what: str) -> int:
    """Bind and return the port. Raises ConfigError when it is taken."""
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise ConfigError(f"{what} {host}:{port} must be free to listen on, got: {error}") from error
    if not bound:
        raise ConfigError(must_be(f"{what} {host}:{port}", "free to listen on", "an address in use"))
    return bound


async def abort(context: Any, error: MegaMoeError) -> None:
    """End a unary call with the status of `error`; the code and the ranks it names go into trailing metadata."""
    metadata = [(codec.ERROR_CODE_METADATA, error.code)]
    missing = codec.missing_ranks_of(error)
    if missing:
        metadata.append((codec.MISSING_RANKS_METADATA, ",".join(map(str, missing))))
    await context.abort(codec.status_of(error.code), str(error), trailing_metadata=tuple(metadata))
