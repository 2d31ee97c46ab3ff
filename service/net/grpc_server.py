"""What every gRPC server of this product has: limits, keepalive manners, health and reflection.

Owns: the channel options and the health servicer. Message limits come from one number; keepalive pings are taken as
often as a client sends them (a strict server answers GOAWAY too_many_pings and the caller loses its streams).
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health as _health_module
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from megamoe.errors import ConfigError, InternalError, InvalidArgumentError, MegaMoeError, must_be, ranks_of
from service.net import codec
from service.pb import moe_pb2 as pb
from service.ring.step_codec import cut_text

log = logging.getLogger("megamoe.grpc")

_health: Any = _health_module
LAYER_SERVICE = pb.DESCRIPTOR.services_by_name["MoELayer"].full_name
ADMIN_SERVICE = pb.DESCRIPTOR.services_by_name["Admin"].full_name
KEEPALIVE_MS = 20_000
"""How long a connection is quiet before the server pings it, and how long the answer may take."""
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
            # A caller whose machine vanished says nothing any more: its streams must not stay for ever.
            ("grpc.keepalive_time_ms", KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
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
    if port:  # gRPC itself does not say why it cannot bind, and prints to standard error
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            socket.create_server((host.strip("[]"), port), family=family).close()
        except OSError as error:
            raise ConfigError(
                must_be(f"{what} {host}:{port}", "free to listen on", error.strerror or error)
            ) from error
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError:  # it says no reason, only where gRPC would log one
        bound = 0
    if not bound:
        taken = "an address in use, or none of this machine"
        raise ConfigError(must_be(f"{what} {host}:{port}", "free to listen on", taken))
    return bound


def check_free(host: str, port: int, what: str) -> None:
    """Raises ConfigError when `listen` could not bind the port now."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        where = f"{what} {host}:{port}"
        raise ConfigError(f"{where} must be free to listen on, got: {error.strerror}") from error


def unary(
    behavior: Callable[[Any], Awaitable[Any]],
    request: Any,
    serialize: Callable[[Any], bytes],
    *,
    deserialize: Callable[[bytes], Any] | None = None,
) -> Any:
    """The handler of a unary call: `behavior` takes a request message and returns a reply or raises MegaMoeError.

    Garbage is INVALID_ARGUMENT and a bug is INTERNAL, each with a sentence (gRPC itself answers UNKNOWN to both).
    """
    parse, name = deserialize or request.FromString, request.DESCRIPTOR.name

    def read(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            return error

    async def handle(message: Any, context: Any) -> Any:
        failure: MegaMoeError
        try:
            if isinstance(message, DecodeError):
                raise InvalidArgumentError(must_be("message", f"a {name}", message))
            return await behavior(message)
        except MegaMoeError as error:
            failure = error
        except Exception as error:
            log.exception("%s failed", name)
            failure = InternalError(f"{name} failed: {error!r}; this is a bug")
        await abort(context, failure)
        raise AssertionError("abort raises")

    return grpc.unary_unary_rpc_method_handler(
        handle, request_deserializer=read, response_serializer=serialize
    )


def elsewhere(kind: Callable[..., Any], sentence: str) -> Any:
    """The handler of a method that another server has: UNIMPLEMENTED, saying which. kind: grpc.*_rpc_method_handler."""

    async def refuse(request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, sentence)

    return kind(refuse)


async def abort(context: Any, error: MegaMoeError) -> None:
    """End a unary call with the status of `error`; the code and the ranks it names go into trailing metadata."""
    metadata = [(codec.ERROR_CODE_METADATA, error.code)]
    missing = ranks_of(error)
    if missing:
        metadata.append((codec.MISSING_RANKS_METADATA, ",".join(map(str, missing))))
    sentence = cut_text(str(error)).decode()  # trailing metadata above 8 KB would become another error
    await context.abort(codec.status_of(error.code), sentence, trailing_metadata=tuple(metadata))
