"""MoeRank: the blocking client of ONE rank, for an attention tier of one process per rank (SPMD).

All ranks' processes connect with one holder before any of them makes a step; then each makes the same steps and layer
calls in the same order, ranks without rows too, so that sequences and step ids are counted alike without a word.
Owns the lease, both counts and the memory that it lends. How a call reaches its rank is the business of a transport.
One thread at a time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

from megamoe import MemoryKind, PlanId, SharedMemory, share_memory
from megamoe.errors import InvalidArgumentError, MegaMoeError, StaleCallError, UnavailableError, must_be
from service.client.blocking import Loop
from service.client.grpc_transport import GrpcTransport
from service.client.info import ServiceInfo
from service.client.numbers import check_time, integer, whole
from service.client.rank_lease import info_of, keep_lease, open_stream, release, take_lease
from service.client.rank_step import RankStep
from service.client.ring_transport import RingTransport
from service.client.transport import MARGIN_S, Link, Transport
from service.client.values import phases_of
from service.messages import IntentRequest
from service.pb import moe_pb2 as pb

TRANSPORTS = ("ring", "memory", "grpc")
_SPIN_ON_GPU_US = 1000.0
"""As the service's loops: longer than a decode layer of a large model (400 us on an H200), shorter than is felt."""


class MoeRank:
    """One rank of a service, leased with its mates under one holder. Made by `connect`."""

    def __init__(self, link: Link, holder: str, granted: pb.LeaseGranted, transport: Transport) -> None:
        self.info = link.info
        self.rank = link.rank
        self.holder = holder
        self.lease_serial = link.lease_serial
        self.generation: int = granted.generation
        self._link = link
        self._transport = transport
        self._next_sequence: int = granted.first_sequence
        self._next_step_id: int = granted.first_step_id
        self._ended: dict[int, PlanId] = {}
        self._memories: list[SharedMemory] = []
        self._num_steps = 0
        self._pid = os.getpid()
        self._is_closed = False

    @classmethod
    @contextlib.contextmanager
    def connect(
        cls,
        front: str,
        *,
        rank: int,
        holder: str,
        transport: str = "ring",
        max_rows: int = 0,
        num_calls: int = 4,
        spin_us: float | None = None,
        wait_ready_s: float = 30.0,
    ) -> Iterator[MoeRank]:
        """Lease rank `rank` of the service at `front` (host:port) for the caller group called `holder`.

        transport: how rows travel. "ring": through shared memory of the host; "memory": they stay in memory that the
        rank reads and writes (`share`); "grpc": over the network. max_rows: most rows of one layer call, 0 = the
        service's max_tokens_per_rank; num_calls: layer calls in flight; spin_us: how long a wait looks for its answer
        before it sleeps, which keeps a core busy: None = 1000 where ranks are on GPUs, else 0.
        Raises UnavailableError (not ready, or not on this host), LeaseHeldError, OverloadedError (too many rings).
        """
        if transport not in TRANSPORTS:
            raise InvalidArgumentError(
                must_be("transport", f"one of {', '.join(TRANSPORTS)}", repr(transport))
            )
        rank = whole("rank", rank, 2**31)
        max_rows, num_calls = whole("max_rows", max_rows, 2**31), whole("num_calls", num_calls, 2**31)
        check_time("spin_us", spin_us)
        loop = Loop.shared()
        with contextlib.ExitStack() as opened:
            info = loop.run(info_of(front, wait_ready_s))
            if not 0 <= rank < info.num_ranks:
                raise InvalidArgumentError(must_be("rank", f"from 0 to {info.num_ranks - 1}", rank))
            if transport != "grpc":
                _check_ring(info, max_rows, num_calls)
            stream = loop.run(open_stream(info, rank))
            opened.callback(lambda: loop.run(stream.close()))
            granted = loop.run(take_lease(stream, holder, info.limits.max_micro_batches))
            link = Link(info=info, rank=rank, lease_serial=granted.lease_serial, stream=stream, loop=loop)
            way: Transport
            if transport == "grpc":
                way = GrpcTransport(link)
            else:
                if spin_us is None:
                    spin_us = 0.0 if info.backend == "cpu" else _SPIN_ON_GPU_US
                most = max_rows or info.limits.max_tokens_per_rank
                way = RingTransport(
                    link,
                    in_memory=transport == "memory",
                    max_rows=most,
                    num_calls=num_calls,
                    spin_us=spin_us,
                )
            # Not earlier: a process that finds no place must not end the lease of its mates.
            opened.callback(release, link, holder)
            moe = cls(link, holder, granted, way)
            opened.callback(moe._close)
            keeper = loop.submit(lambda: keep_lease(link, holder, lambda: moe._num_steps))
            opened.callback(keeper.cancel)
            yield moe

    # ------------------------------------------------------------------------------ memory

    @property
    def memory_kinds(self) -> tuple[MemoryKind, ...]:
        """Kinds of memory that `share` can give; none but with transport "memory"."""
        return self._transport.memory_kinds

    def share(self, num_bytes: int, *, device: str = "") -> SharedMemory:
        """Memory that the rank reads rows from and writes results to: `.tensor(offset, shape, dtype)` of it may be
        `hidden_states`, `hidden_states_sf` and `out` of layer calls. Offsets are multiples of 16 bytes.

        device: for a rank on a GPU, the same GPU as torch names it here; "" = memory of the host. It ends with this
        object, or at `unshare`.
        """
        self._check_usable()
        kind = MemoryKind.CUDA_IPC if device else MemoryKind.POSIX_SHM
        kinds = self._transport.memory_kinds
        if kind not in kinds:
            opened = ", ".join(kinds) or "none with this transport"
            raise InvalidArgumentError(must_be("kind of memory", f"one that the rank opens ({opened})", kind))
        memory = share_memory(num_bytes, kind=kind, device=device)
        try:
            self._transport.lend(memory)
        except BaseException:
            memory.close()
            raise
        self._memories.append(memory)
        return memory

    def unshare(self, memory: SharedMemory) -> None:
        """Take memory back: no later call may use it. Its tensors are gone with it."""
        own = next((one for one in self._memories if one is memory), None)
        if own is None:
            raise InvalidArgumentError(must_be("memory", "of MoeRank.share, and taken back once", memory))
        self._memories.remove(own)
        try:
            self._transport.take_back(own)
        finally:
            own.close()

    # ------------------------------------------------------------------------------ steps

    @contextlib.contextmanager
    def step(
        self,
        num_rows: int | Sequence[int],
        phase: str = "decode",
        micro_batch_idx: int = 0,
        *,
        dtype: str = "bfloat16",
        timeout_s: float | None = None,
    ) -> Iterator[RankStep]:
        """Agree with the other ranks on one plan for all layers of a step; every rank's process calls this.

        num_rows: rows of this rank, or of every rank where they are known. phase: "prefill" or "decode".
        Raises the error that the ranks agreed on; nothing is open then.
        """
        self._check_usable()
        # Counted before anything is refused: whatever one rank refuses, all ranks name their next step alike.
        step_id = self._next_step_id
        self._next_step_id += 1
        micro_batch_idx = whole("micro_batch_idx", micro_batch_idx, 2**32)
        check_time("timeout_s", timeout_s)
        counts = tuple(num_rows) if isinstance(num_rows, Sequence) else None
        if counts is not None and len(counts) != self.info.num_ranks:
            wanted = f"one number, or {self.info.num_ranks}, one per rank"
            raise InvalidArgumentError(must_be("num_rows", wanted, list(counts)))
        own = integer("num_rows", num_rows if counts is None else counts[self.rank])
        plan_id = PlanId(self.generation, step_id, micro_batch_idx)
        self._num_steps += 1
        wait_s = timeout_s or self.info.limits.step_timeout_s
        self._close_ended(micro_batch_idx)
        plan, sub_steps = self._transport.agree(
            IntentRequest(
                lease_serial=self.lease_serial,
                plan_id=plan_id,
                num_rows=own,
                phase=phases_of(phase, (own,))[0],
                dtype=dtype,
                num_rows_per_rank=counts,
                timeout_s=timeout_s,
            ),
            wait_s + MARGIN_S,
        )
        step = RankStep(
            plan,
            sub_steps,
            self.lease_serial,
            self._transport,
            take_sequence=self._take_sequence,
            check_usable=self._check_usable,
            timeout_s=2 * wait_s + MARGIN_S,
        )
        try:
            yield step
        finally:
            step.is_open = False
            self._ended[micro_batch_idx] = plan_id

    def _close_ended(self, micro_batch_idx: int) -> None:
        """The next step of a micro-batch closes the one before it; steps of others are closed here."""
        self._ended.pop(micro_batch_idx, None)
        for other in list(self._ended):
            self._transport.close_step(self.lease_serial, self._ended.pop(other))

    def _take_sequence(self) -> int:
        sequence = self._next_sequence
        self._next_sequence = sequence + 1
        return sequence

    # ------------------------------------------------------------------------------ lease, end

    def _check_usable(self) -> None:
        """Raises StaleCallError after the end of `connect`'s `with`, UnavailableError in a forked process."""
        if self._is_closed:
            raise StaleCallError(
                "a MoeRank must be used inside the `with` of its connect, got a call after it"
            )
        if self._pid != os.getpid():
            must = must_be("process of a MoeRank", f"{self._pid}, which connected", f"a fork, {os.getpid()}")
            raise UnavailableError(must)

    def _close(self) -> None:
        self._is_closed = True
        for memory in list(self._memories):
            with contextlib.suppress(MegaMoeError):  # a rank that is gone has let go of it
                self._transport.take_back(memory)
        self._transport.close()
        for memory in self._memories:
            memory.close()


def _check_ring(info: ServiceInfo, max_rows: int, num_calls: int) -> None:
    """Raise InvalidArgumentError for a ring that the service opens for nobody."""
    limits = info.limits
    for name, value, most, why in (
        ("max_rows", max_rows, limits.max_step_rows, "max_step_rows"),
        ("num_calls", num_calls, limits.max_calls_per_ring, "max_calls_per_ring"),
    ):
        if value > most:
            raise InvalidArgumentError(must_be(name, f"at most {most} ({why} of the service)", value))
