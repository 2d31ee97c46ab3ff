"""MoeRank: the blocking client of ONE rank, for an attention tier of one process per rank (SPMD).

All ranks' processes connect with one holder before any of them makes a step; then each makes the same steps and layer
calls in the same order, ranks without rows too, so that sequences and step ids are counted alike without a word.
Owns the lease, both counts and the memory that it lends. How a call reaches its rank is the business of a transport.
One thread at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import operator
import os
from collections.abc import Iterator, Sequence

import torch

from megamoe import MemoryKind, PlanId, SharedMemory, StepPlan, SubStep, SubStepReport, share_memory
from megamoe.errors import InvalidArgumentError, MegaMoeError, StaleCallError, UnavailableError, must_be
from service.client.blocking import Loop
from service.client.front import AsyncFront
from service.client.grpc_transport import GrpcTransport
from service.client.info import ServiceInfo
from service.client.ring_transport import RingTransport
from service.client.stream import RankStream
from service.client.transport import MARGIN_S, Call, Link, Transport
from service.client.values import phases_of
from service.messages import IntentRequest
from service.pb import moe_pb2 as pb

TRANSPORTS = ("ring", "memory", "grpc")
_LEASE_TRIES = 3
_SPIN_ON_GPU_US = 1000.0
"""As the service's loops: longer than a decode layer of a large model (400 us on an H200), shorter than is felt."""


class RankOutput:
    """One layer on one rank. hidden_states: [n, hidden] bf16, `out` where one was given. queue_us: in the rank's ring
    before execution; total_us: from there until the result was there. sub_steps: a report per executed piece."""

    __slots__ = ("_call", "hidden_states", "queue_us", "total_us")

    def __init__(self, hidden_states: torch.Tensor, queue_us: float, total_us: float, call: Call) -> None:
        self.hidden_states = hidden_states
        self.queue_us = queue_us
        self.total_us = total_us
        self._call = call

    @property
    def sub_steps(self) -> tuple[SubStepReport, ...]:
        return self._call.reports()


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
        rank = _whole("rank", rank, 2**31)
        max_rows, num_calls = _whole("max_rows", max_rows, 2**31), _whole("num_calls", num_calls, 2**31)
        _check_time("spin_us", spin_us)
        loop = Loop.shared()
        with contextlib.ExitStack() as opened:
            info = loop.run(_info_of(front, wait_ready_s))
            if not 0 <= rank < info.num_ranks:
                raise InvalidArgumentError(must_be("rank", f"from 0 to {info.num_ranks - 1}", rank))
            if transport != "grpc":
                _check_ring(info, max_rows, num_calls)
            stream = loop.run(_open_stream(info, rank))
            opened.callback(lambda: loop.run(stream.close()))
            granted = loop.run(_take_lease(stream, holder, info.limits.max_micro_batches))
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
            opened.callback(_release, link, holder)
            moe = cls(link, holder, granted, way)
            opened.callback(moe._close)
            keeper = loop.submit(moe._keep_lease)
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
        micro_batch_idx = _whole("micro_batch_idx", micro_batch_idx, 2**32)
        _check_time("timeout_s", timeout_s)
        counts = tuple(num_rows) if isinstance(num_rows, Sequence) else None
        if counts is not None and len(counts) != self.info.num_ranks:
            wanted = f"one number, or {self.info.num_ranks}, one per rank"
            raise InvalidArgumentError(must_be("num_rows", wanted, list(counts)))
        own = _integer("num_rows", num_rows if counts is None else counts[self.rank])
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
        step = RankStep(self, plan, sub_steps, 2 * wait_s + MARGIN_S)
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

    async def _keep_lease(self) -> None:
        """Steps keep the lease; an idle caller sends a Lease now and then."""
        pause_s, seen = self.info.limits.lease_timeout_s / 4, -1
        while True:
            await asyncio.sleep(pause_s)
            if seen == self._num_steps:
                request = pb.ForwardRequest(lease=pb.Lease(holder=self.holder))
                with contextlib.suppress(MegaMoeError):  # the next step says what is wrong
                    await self._link.stream.request(request, timeout_s=MARGIN_S)
            seen = self._num_steps

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


class RankStep:
    """An open plan on one rank. `plan` is what all ranks agreed on, `sub_steps` how each layer will be executed."""

    def __init__(
        self, moe: MoeRank, plan: StepPlan, sub_steps: tuple[SubStep, ...], timeout_s: float
    ) -> None:
        self.plan = plan
        self.sub_steps = sub_steps
        self.is_open = True
        self.timeout_s = timeout_s
        plan_id = plan.plan_id
        self.names = moe.lease_serial, plan_id.generation, plan_id.step_id, plan_id.micro_batch_idx
        self._moe = moe
        self._start = moe._transport.start

    def layer(
        self,
        layer_idx: int,
        hidden_states: torch.Tensor | None = None,
        topk_ids: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        hidden_states_sf: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
    ) -> RankOutput:
        """Run one layer: hidden_states [n, hidden] bf16 (or e4m3 codes with hidden_states_sf [n, hidden / 32] uint8),
        topk_ids [n, num_topk] int32, topk_weights [n, num_topk] fp32; nothing for a rank without rows.

        out: [n, hidden] bf16 to write into; with transport "memory" it is needed, and it and the rows lie in memory
        that `share` gave. ids and weights are always on the host. Layer indices grow within a step.
        Raises the error that all ranks answer, InvalidArgumentError for tensors of this one that are none of these
        among them; the step stays open after it. OverloadedError when as many calls are in flight as `connect` said:
        then nothing was sent.
        """
        return self.start_layer(
            layer_idx, hidden_states, topk_ids, topk_weights, hidden_states_sf, out=out
        ).result()

    def start_layer(
        self,
        layer_idx: int,
        hidden_states: torch.Tensor | None = None,
        topk_ids: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        hidden_states_sf: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
    ) -> StartedLayer:
        """`layer` without waiting: its place in the total order is taken now. Tensors must stay until `result`."""
        if not self.is_open:
            raise StaleCallError(f"step {self.plan.plan_id} is closed: layers run inside its `with`")
        self._moe._check_usable()
        rows = hidden_states, topk_ids, topk_weights, hidden_states_sf
        take = self._moe._take_sequence
        try:
            layer_idx = _integer("layer_idx", layer_idx)
            call = self._start(self.names, layer_idx, take, rows, out, self.timeout_s)
        except InvalidArgumentError as error:
            # The others wait for this call, or have made it: they hear what is wrong with it.
            call = self._moe._transport.refuse(self.names, take(), error, self.timeout_s)
        return StartedLayer(self._moe, call)


class StartedLayer:
    """A layer call in flight. Call `result` once."""

    __slots__ = ("_call", "_moe")

    def __init__(self, moe: MoeRank, call: Call) -> None:
        self._moe = moe
        self._call: Call | None = call

    def result(self) -> RankOutput:
        """Wait for it. Raises what `RankStep.layer` says."""
        call, self._call = self._call, None  # its place in the ring is another call's afterwards
        if call is None:
            raise StaleCallError("result of a layer call must be taken once, got a second time")
        self._moe._check_usable()
        hidden_states, queue_us, total_us = call.wait()
        return RankOutput(hidden_states, queue_us, total_us, call)


def _integer(name: str, value: object) -> int:
    """A number that fits 64 bits. Raises InvalidArgumentError."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidArgumentError(must_be(name, "an integer", repr(value))) from None
    if not -(2**63) <= number < 2**63:
        raise InvalidArgumentError(must_be(name, "a 64-bit integer", number))
    return number


def _whole(name: str, value: object, end: int) -> int:
    number = _integer(name, value)
    if not 0 <= number < end:
        raise InvalidArgumentError(must_be(name, f"from 0 to {end - 1}", number))
    return number


def _check_ring(info: ServiceInfo, max_rows: int, num_calls: int) -> None:
    """Raise InvalidArgumentError for a ring that the service opens for nobody."""
    limits = info.limits
    for name, value, most, why in (
        ("max_rows", max_rows, limits.max_step_rows, "max_step_rows"),
        ("num_calls", num_calls, limits.max_calls_per_ring, "max_calls_per_ring"),
    ):
        if value > most:
            raise InvalidArgumentError(must_be(name, f"at most {most} ({why} of the service)", value))


def _check_time(name: str, value: object) -> None:
    if value is not None and not (isinstance(value, int | float) and 0 <= value < math.inf):
        raise InvalidArgumentError(must_be(name, "a finite number of at least 0", repr(value)))


async def _info_of(address: str, wait_ready_s: float) -> ServiceInfo:
    async with AsyncFront(address) as front:
        return await front.wait_ready(wait_ready_s)


async def _open_stream(info: ServiceInfo, rank: int) -> RankStream:
    return RankStream(rank, info.rank_addresses[rank], max_message_bytes=info.limits.max_message_bytes)


async def _take_lease(stream: RankStream, holder: str, max_micro_batches: int) -> pb.LeaseGranted:
    """The lease of all processes of `holder`; where an earlier run of them has used it, a new one."""
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


def _release(link: Link, holder: str) -> None:
    lease = pb.Lease(holder=holder, release=True, lease_serial=link.lease_serial)
    with contextlib.suppress(MegaMoeError):
        link.ask(pb.ForwardRequest(lease=lease))
