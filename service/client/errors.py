"""What the service refused or failed, as the exception classes of megamoe.errors with the gRPC status beside them."""

from __future__ import annotations

from typing import Any, cast

import grpc

from megamoe.errors import ERROR_BY_CODE, MegaMoeError, error_from_code
from service.net import codec
from service.pb import moe_pb2 as pb


class RemoteError(MegaMoeError):
    """Mixed into every error that came over the wire. status: the gRPC status; rank: who answered, None = the front."""

    status: grpc.StatusCode = grpc.StatusCode.UNKNOWN
    rank: int | None = None


_REMOTE: dict[str, type[MegaMoeError]] = {
    code: type(kind.__name__, (kind, RemoteError), {"__module__": __name__, "__doc__": kind.__doc__})
    for code, kind in ERROR_BY_CODE.items()
}

_CODE_BY_STATUS = {
    grpc.StatusCode.UNAVAILABLE: "unavailable",
    grpc.StatusCode.CANCELLED: "unavailable",
    grpc.StatusCode.DEADLINE_EXCEEDED: "peer_timeout",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "overloaded",
    grpc.StatusCode.INVALID_ARGUMENT: "invalid_argument",
    grpc.StatusCode.FAILED_PRECONDITION: "stale_call",
}
"""For statuses that gRPC itself made, or a service that sends no error code."""


def remote_error(
    code: str,
    message: str,
    *,
    status: grpc.StatusCode,
    missing_ranks: tuple[int, ...] = (),
    rank: int | None = None,
) -> MegaMoeError:
    """The exception of class `code` that is a RemoteError too."""
    error: Any = error_from_code(code, message, missing_ranks, classes=_REMOTE)
    error.status = status
    error.rank = rank
    return error  # type: ignore[no-any-return]


def from_message(error: pb.Error, rank: int) -> MegaMoeError:
    """The exception of an Error reply on a stream."""
    return remote_error(
        error.code,
        error.message,
        status=codec.status_of(error.code),
        missing_ranks=tuple(error.missing_ranks),
        rank=rank,
    )


def from_rpc(error: grpc.aio.AioRpcError, *, where: str, rank: int | None = None) -> MegaMoeError:
    """The exception of a failed call or stream; its trailing metadata says the code when the service made it."""
    metadata: dict[str, str | bytes] = dict(cast("Any", error.trailing_metadata()) or ())
    said = metadata.get(codec.ERROR_CODE_METADATA)
    missing = str(metadata.get(codec.MISSING_RANKS_METADATA, ""))
    status, details = error.code(), error.details() or "no details"
    if said is None and status is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return remote_error(
            "invalid_argument",
            f"message to or from {where} is above its limit: {details}; "
            "raise max_message_bytes of the service (Limits.max_message_bytes) or bring fewer rows a step",
            status=status,
            rank=rank,
        )
    code = str(said) if said is not None else _CODE_BY_STATUS.get(status, "internal")
    text = details if said is not None else f"{where}: {status.name}: {details}"
    ranks = tuple(int(part) for part in missing.split(",") if part)
    return remote_error(code, text, status=status, missing_ranks=ranks, rank=rank)


def same_error(error: MegaMoeError) -> MegaMoeError:
    """A new exception that says the same."""
    made: Any = type(error)(str(error))
    made.__dict__.update(error.__dict__)
    return made  # type: ignore[no-any-return]


def worst(errors: list[MegaMoeError]) -> MegaMoeError:
    """The error to raise when several ranks answered one: the refusal itself rather than its echo at the peers."""
    echoes = ("peer_refused", "unavailable")
    return min(errors, key=lambda error: echoes.index(error.code) + 1 if error.code in echoes else 0)
