"""The exceptions of the library: one small tree, each class saying who can recover.

Every message is one sentence that names the field, what it must be and what it was. `code` is a stable
spelling that crosses process borders (ring, board, metrics label) and comes back as the same class by
`error_from_code`; the service maps it to a gRPC status in one table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar


class MegaMoeError(Exception):
    """Base of all errors raised on purpose. `code` names the class across processes."""

    code: ClassVar[str] = "internal"


class CallerError(MegaMoeError):
    """The caller recovers: by sending something else, or the same again later."""

    code: ClassVar[str] = "caller"


class InvalidArgumentError(CallerError):
    """A field is malformed or out of range. Sending the same again fails again."""

    code: ClassVar[str] = "invalid_argument"


class StaleCallError(CallerError):
    """Plan not open, layer not above the last, sequence already done, or another generation or lease."""

    code: ClassVar[str] = "stale_call"


class AgreementError(CallerError):
    """The ranks of a step do not say the same (counts, versions, step id). The same on all ranks."""

    code: ClassVar[str] = "agreement"


class LeaseHeldError(CallerError):
    """Another caller group holds the service; the message names the holder."""

    code: ClassVar[str] = "lease_held"


class OverloadedError(CallerError):
    """A bounded queue is full. Retry after a pause."""

    code: ClassVar[str] = "overloaded"


class DrainingError(CallerError):
    """The service finishes what is open and takes no new plans. Go to another one."""

    code: ClassVar[str] = "draining"


class PeerTimeoutError(MegaMoeError):
    """A wait ended without a peer. Retrying opens a new plan and is safe; the operator looks at the rank.

    `missing_ranks` are the ranks that did not come, in ascending order.
    """

    code: ClassVar[str] = "peer_timeout"

    def __init__(self, message: str, missing_ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.missing_ranks = tuple(sorted(missing_ranks))


class PeerRefusedError(CallerError):
    """A peer joined this layer call with zero rows and an error bit. The plan stays open.

    `refusing_ranks` are the ranks that set the bit; the text of their refusal lies on the board.
    """

    code: ClassVar[str] = "peer_refused"

    def __init__(self, message: str, refusing_ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.refusing_ranks = tuple(sorted(refusing_ranks))


class UnavailableError(MegaMoeError):
    """A rank is gone or the group restarts. Retry with a new lease when the service is ready."""

    code: ClassVar[str] = "unavailable"


class OperatorError(MegaMoeError):
    """The operator recovers: by changing the configuration or the machine. Raised at start or by Admin."""

    code: ClassVar[str] = "operator"


class ConfigError(OperatorError):
    """A setting is impossible; the message names it and the rule."""

    code: ClassVar[str] = "config"


class IneligibleError(OperatorError):
    """A path or layout that this deployment does not build was asked for by name."""

    code: ClassVar[str] = "ineligible"


class BindingError(OperatorError):
    """Weights cannot be bound. Every view, table and slot is as it was before."""

    code: ClassVar[str] = "binding"


class HeapError(OperatorError):
    """Shared memory is short or gone; the message says wanted and available bytes."""

    code: ClassVar[str] = "heap"


class InternalError(MegaMoeError):
    """This is a bug in megamoe: an impossible state. Nobody outside can recover."""

    code: ClassVar[str] = "internal"


_ALL: tuple[type[MegaMoeError], ...] = (
    InvalidArgumentError,
    StaleCallError,
    AgreementError,
    LeaseHeldError,
    OverloadedError,
    DrainingError,
    PeerTimeoutError,
    PeerRefusedError,
    UnavailableError,
    ConfigError,
    IneligibleError,
    BindingError,
    HeapError,
    InternalError,
)
ERROR_BY_CODE: dict[str, type[MegaMoeError]] = {error.code: error for error in _ALL}


def ranks_of(error: MegaMoeError) -> tuple[int, ...]:
    """The ranks that an error names: those that are missing, or that refused."""
    if isinstance(error, PeerTimeoutError):
        return error.missing_ranks
    return error.refusing_ranks if isinstance(error, PeerRefusedError) else ()


def error_from_code(
    code: str,
    message: str,
    ranks: Iterable[int] = (),
    *,
    classes: Mapping[str, type[MegaMoeError]] = ERROR_BY_CODE,
) -> MegaMoeError:
    """The exception of class `code` with `message`, naming `ranks` if its class names any; what `ranks_of` undoes.

    An unknown code becomes InternalError. classes: subclasses of them by code, to make these instead.
    """
    kind = classes.get(code, classes[InternalError.code])
    if issubclass(kind, PeerTimeoutError | PeerRefusedError):
        return kind(message, ranks)
    return kind(message)


def must_be(field: str, wanted: object, got: object) -> str:
    """The one sentence form of refusals: `field must be wanted, got got`."""
    return f"{field} must be {wanted}, got {got}"
