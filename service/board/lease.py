"""Who may call: one lease on the board, held by one caller group at a time.

The record is (serial, holder, first step id, first sequence). It changes only under the board's lock, so that eight
ranks that are asked at the same moment give one answer. A lease ends when its holder gives it back, or when another
group asks after no rank heard of the holder for lease_timeout_s; serials grow and never come back.
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass, replace

from megamoe.errors import InvalidArgumentError, LeaseHeldError, StaleCallError, must_be
from service.board.board import Board
from service.board.layout import LEASE_AT, LEASE_BYTES
from service.messages import LeaseReply

_RECORD = struct.Struct("<QQQHH")  # serial, first step id, first sequence, held, holder length
MAX_HOLDER_BYTES = LEASE_BYTES - _RECORD.size

DEFAULT_LEASE_TIMEOUT_S = 10.0
"""Protocol: a lease lasts 10 s without traffic."""


@dataclass(frozen=True)
class Lease:
    """The lease as it stands; serial 0 and an empty holder before the first."""

    serial: int
    first_step_id: int
    first_sequence: int
    held: bool
    holder: str


class LeaseTable:
    """The lease record of a board."""

    def __init__(self, board: Board, *, timeout_s: float = DEFAULT_LEASE_TIMEOUT_S) -> None:
        self._board = board
        self._timeout_ns = int(timeout_s * 1e9)
        self.timeout_s = timeout_s

    def read(self) -> Lease:
        """The record, under the board's lock, which the caller holds."""
        at, buf = LEASE_AT, self._board.buf
        serial, first_step_id, first_sequence, held, holder_len = _RECORD.unpack_from(buf, at)
        holder = bytes(buf[at + _RECORD.size : at + _RECORD.size + holder_len]).decode()
        return Lease(serial, first_step_id, first_sequence, bool(held), holder)

    def take(self, holder: str, rank: int, *, now_ns: int | None = None) -> LeaseReply:
        """Grant or keep the lease of `holder`. Raises LeaseHeldError naming who else holds it."""
        raw = holder.encode()
        if not 1 <= len(raw) <= MAX_HOLDER_BYTES:
            raise InvalidArgumentError(
                must_be("holder", f"a name of 1 to {MAX_HOLDER_BYTES} bytes", repr(holder[:80]))
            )
        board = self._board
        now_ns = time.monotonic_ns() if now_ns is None else now_ns
        with board.locked():
            lease = self.read()
            quiet_ns = max(now_ns - board.last_traffic_ns(), 0)
            if lease.held and lease.holder != holder and quiet_ns < self._timeout_ns:
                raise LeaseHeldError(
                    f"the service is held by caller group {lease.holder!r} (last heard of {quiet_ns * 1e-9:.1f} s "
                    f"ago, its lease ends {self.timeout_s:g} s after that), got a request of {holder!r}"
                )
            board.mark_traffic(rank, now_ns)
            if not lease.held or lease.holder != holder:
                lease = Lease(
                    lease.serial + 1, board.highest_step + 1, board.highest_sequence + 1, True, holder
                )
                self._write(lease, raw)
            reply = LeaseReply(
                lease_serial=lease.serial,
                generation=board.generation,
                next_sequence=board.highest_sequence + 1,
                next_step_id=board.highest_step + 1,
                first_sequence=lease.first_sequence,
                first_step_id=lease.first_step_id,
            )
        board.ring_all()
        return reply

    def release(self, holder: str, serial: int | None = None) -> None:
        """Give the lease back; giving back what is not held any more does nothing. Raises LeaseHeldError."""
        board = self._board
        with board.locked():
            lease = self.read()
            if not lease.held or (serial is not None and serial != lease.serial):
                return
            if lease.holder != holder:
                raise LeaseHeldError(
                    f"the lease is held by caller group {lease.holder!r}, got a release by {holder!r}"
                )
            self._write(replace(lease, held=False), holder.encode())
        board.ring_all()

    def _write(self, lease: Lease, raw: bytes) -> None:
        at, buf = LEASE_AT, self._board.buf
        _RECORD.pack_into(
            buf, at, lease.serial, lease.first_step_id, lease.first_sequence, lease.held, len(raw)
        )
        buf[at + _RECORD.size : at + _RECORD.size + len(raw)] = raw
        self._board.bump_lease()


def check_serial(lease: Lease, serial: int) -> None:
    """Raise StaleCallError unless `serial` is the lease in force."""
    if lease.held and serial == lease.serial:
        return
    if lease.held:
        state = f"{lease.serial}, held by caller group {lease.holder!r}"
    elif lease.serial:
        state = f"a new one: lease {lease.serial} was given back"
    else:
        state = "asked for first: nobody holds a lease"
    raise StaleCallError(must_be("lease_serial", state, serial))
