"""The lease that the processes of one holder share: how each takes it, keeps it while it is idle, and gives it back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from megamoe.errors import MegaMoeError, UnavailableError
from service.client.front import AsyncFront
from service.client.info import ServiceInfo
from service.client.stream import RankStream
from service.client.transport import MARGIN_S, Link
from service.pb import moe_pb2 as pb

_LEASE_TRIES = 3


async def info_of(address: str, wait_ready_s: float) -> ServiceInfo:
    """What the service at `address` says of itself once it is ready. Raises UnavailableError."""
    async with AsyncFront(address) as front:
        return await front.wait_ready(wait_ready_s)


async def open_stream(info: ServiceInfo, rank: int) -> RankStream:
    """To one rank; on the event loop that it will live on."""
    return RankStream(rank, info.rank_addresses[rank], max_message_bytes=info.limits.max_message_bytes)


async def take_lease(stream: RankStream, holder: str, max_micro_batches: int) -> pb.LeaseGranted:
    """The lease of all processes of `holder`; where an earlier run of them has used it, a new one.

    Raises LeaseHeldError, UnavailableError.
    """
    for _ in range(_LEASE_TRIES):
        request = pb.ForwardRequest(lease=pb.Lease(holder=holder))
        granted = (await stream.request(request, timeout_s=MARGIN_S)).message.lease_granted
        # Mates that were quicker may wait with their first steps; no layer call can have run without this rank.
        steps = granted.next_step_id - granted.first_step_id
        if granted.next_sequence == granted.first_sequence and steps <= max_micro_batches:
            return granted
        used = pb.Lease(holder=holder, release=True, lease_serial=granted.lease_serial)
        await stream.request(pb.ForwardRequest(lease=used), timeout_s=MARGIN_S)
    raise UnavailableError(
        f"the lease of {holder!r} is used by others: connect all ranks before the first step"
    )


async def keep_lease(link: Link, holder: str, num_steps: Callable[[], int]) -> None:
    """Steps keep the lease; an idle caller sends a Lease now and then. Until it is cancelled."""
    pause_s, seen = link.info.limits.lease_timeout_s / 4, -1
    while True:
        await asyncio.sleep(pause_s)
        if seen == num_steps():
            request = pb.ForwardRequest(lease=pb.Lease(holder=holder))
            with contextlib.suppress(MegaMoeError):  # the next step says what is wrong
                await link.stream.request(request, timeout_s=MARGIN_S)
        seen = num_steps()


def release(link: Link, holder: str) -> None:
    """Give it back, if the rank is still there."""
    lease = pb.Lease(holder=holder, release=True, lease_serial=link.lease_serial)
    with contextlib.suppress(MegaMoeError):
        link.ask(pb.ForwardRequest(lease=lease))
