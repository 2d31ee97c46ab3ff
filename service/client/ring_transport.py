"""To a rank on this host through a ring of this process's own, with the rows in the ring or in memory that it lends.

Nothing here is gRPC but the opening of the ring and of memory. Refuses tensors that are no rows of a layer before
anything is sent: a ring moves bytes by address.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from megamoe import (
    MX_BLOCK,
    MemoryKind,
    PlanId,
    SharedMemory,
    SharedSegment,
    StepPlan,
    SubStep,
    SubStepReport,
)
from megamoe.errors import (
    HeapError,
    InvalidArgumentError,
    MegaMoeError,
    OverloadedError,
    UnavailableError,
    must_be,
)
from service.client.errors import remote_error
from service.client.transport import MARGIN_S, Link, Names, Tensors
from service.messages import CloseRequest, ErrorReply, IntentRequest, PlanReply
from service.net import codec
from service.pb import moe_pb2 as pb
from service.ring import codec as ring_codec
from service.ring import layout
from service.ring.bell import Bell
from service.ring.caller import RingCaller
from service.ring.step_codec import LAYER_BODY_BYTES, REFUSAL_BODY_BYTES

_NO_POINTERS, _NO_PLACES = (0, 0, 0, 0), (0, 0, 0, 0, 0)
_BF16, _U8, _I32, _F32 = torch.bfloat16, torch.uint8, torch.int32, torch.float32
_MXFP8 = (torch.uint8, torch.float8_e4m3fn)
_SCALES = (torch.uint8, torch.float8_e8m0fnu)


class RingTransport:
    """See the module. in_memory: rows and results lie in lent memory, always."""

    def __init__(self, link: Link, *, in_memory: bool, max_rows: int, num_calls: int, spin_us: float) -> None:
        self._link = link
        self._in_memory = in_memory
        request = pb.OpenRing(
            lease_serial=link.lease_serial, max_rows=max_rows, num_calls=num_calls, rows_in_memory=in_memory
        )
        wait_s = link.info.limits.step_timeout_s + MARGIN_S
        opened = link.ask(pb.ForwardRequest(open_ring=request), wait_s).message.ring_opened
        self.memory_kinds = tuple(map(MemoryKind, opened.memory_kinds)) if in_memory else ()
        try:
            segment = SharedSegment.attach(opened.segment, prefault=True)
            self._bell_page = SharedSegment.attach_page(opened.bell_segment, opened.bell_page)
        except HeapError as error:
            where = f"rank {link.rank} at {link.stream.address}"
            raise UnavailableError(f"{where} must be on this host for its ring, got: {error}") from error
        bell = Bell(self._bell_page, opened.bell_offset, opened.writer_id)
        self._ring = RingCaller(segment, bell, check_alive=link.stream.check_alive, spin_s=spin_us * 1e-6)
        shape = link.info.shape
        self._hidden, self._num_topk, self._num_ranks = shape.hidden, shape.num_topk, shape.num_ranks
        self._lent: list[tuple[int, int, int, SharedMemory]] = []
        self._next_memory_id = 1

    # ------------------------------------------------------------------------------ steps

    def agree(self, request: IntentRequest, wait_s: float) -> tuple[StepPlan, tuple[SubStep, ...]]:
        ring = self._ring
        at = ring.send(request)
        try:
            ring.wait_for(at, wait_s)
            reply = ring_codec.decode_reply(*ring.reply_of_control(at), self._num_ranks, _NO_ROWS)
        finally:
            ring.end_control(at)
        if isinstance(reply, PlanReply):
            return reply.plan, reply.sub_steps
        raise self._error(reply)

    def close_step(self, lease_serial: int, plan_id: PlanId) -> None:
        with contextlib.suppress(OverloadedError):  # the lease's end closes it too
            self._ring.end_control(self._ring.send(CloseRequest(lease_serial=lease_serial, plan_id=plan_id)))

    def _error(self, reply: object) -> MegaMoeError:
        assert isinstance(reply, ErrorReply), (
            f"{type(reply).__name__} answers nothing of this: a bug of the service"
        )
        return remote_error(
            reply.code,
            reply.message,
            status=codec.status_of(reply.code),
            missing_ranks=reply.missing_ranks,
            rank=self._link.rank,
        )

    # ------------------------------------------------------------------------------ layer calls

    def start(
        self,
        names: Names,
        layer_idx: int,
        take_sequence: Callable[[], int],
        tensors: Tensors,
        out: torch.Tensor | None,
        wait_s: float,
    ) -> RingCall:
        hidden_states, topk_ids, topk_weights, scales = tensors
        ring = self._ring
        ring.check_place()
        if hidden_states is not None and (
            not isinstance(hidden_states, torch.Tensor) or not hidden_states.ndim
        ):
            wanted = f"a tensor [rows, {self._hidden}]"
            raise InvalidArgumentError(must_be("hidden_states", wanted, type(hidden_states).__name__))
        if hidden_states is None or not hidden_states.shape[0]:
            flags = layout.FLAG_IN_MEMORY if self._in_memory else 0
            at = ring.start_call(names, layer_idx, take_sequence(), 0, _NO_POINTERS, flags=flags)
            nothing = torch.empty((0, self._hidden), dtype=_BF16) if out is None else out
            return RingCall(self, at, 0, flags, nothing, wait_s)
        rows, hidden = hidden_states.shape[0], self._hidden
        if scales is None:
            flags, row_bytes = 0, 2 * hidden
            _check("hidden_states", hidden_states, rows, hidden, (_BF16,))
        else:
            flags, row_bytes = layout.FLAG_MXFP8, hidden
            _check("hidden_states", hidden_states, rows, hidden, _MXFP8)
            _check("hidden_states_sf", scales, rows, hidden // MX_BLOCK, _SCALES)
        _check("topk_ids", topk_ids, rows, self._num_topk, (_I32,))
        _check("topk_weights", topk_weights, rows, self._num_topk, (_F32,))
        assert topk_ids is not None
        assert topk_weights is not None
        if not (topk_ids.is_cpu and topk_weights.is_cpu):
            got = f"{topk_ids.device}, {topk_weights.device}"
            raise InvalidArgumentError(must_be("topk_ids, topk_weights", "on the host", got))
        if rows > ring.spec.max_rows:
            limit = f"at most {ring.spec.max_rows} (max_rows of connect)"
            raise InvalidArgumentError(must_be("rows of a layer call", limit, rows))
        if out is not None:
            _check("out", out, rows, hidden, (_BF16,))
        x_ptr, sf_ptr, places = (
            hidden_states.data_ptr(),
            0 if scales is None else scales.data_ptr(),
            _NO_PLACES,
        )
        if self._in_memory:
            flags |= layout.FLAG_IN_MEMORY
            if out is None:
                raise InvalidArgumentError(must_be("out", "given with transport 'memory'", None))
            rows_id, x_at, memory = self._place("hidden_states", x_ptr, rows * row_bytes)
            sf_at = 0
            if scales is not None:
                sf_id, sf_at, _ = self._place("hidden_states_sf", sf_ptr, rows * (hidden // MX_BLOCK))
                if sf_id != rows_id:
                    raise InvalidArgumentError(
                        must_be("hidden_states_sf", "in the memory of hidden_states", sf_id)
                    )
            out_id, out_at, _ = self._place("out", out.data_ptr(), rows * 2 * hidden)
            places = rows_id, out_id, x_at, sf_at, out_at
            memory.publish()
        elif not hidden_states.is_cpu or (out is not None and not out.is_cpu):
            got = f"{hidden_states.device}, {None if out is None else out.device}"
            raise InvalidArgumentError(
                must_be("hidden_states, out", "on the host with transport 'ring'", got)
            )
        if out is None:
            out = torch.empty((rows, hidden), dtype=_BF16)
        pointers = x_ptr, sf_ptr, topk_ids.data_ptr(), topk_weights.data_ptr()
        at = ring.start_call(names, layer_idx, take_sequence(), rows, pointers, places, flags=flags)
        return RingCall(self, at, rows, flags, out, wait_s)

    def refuse(self, names: Names, sequence: int, error: InvalidArgumentError, wait_s: float) -> RingCall:
        at = self._ring.refuse_call(names, sequence, ErrorReply.of(error))
        return RingCall(self, at, 0, 0, _NO_ROWS, wait_s, REFUSAL_BODY_BYTES)

    def _place(self, name: str, pointer: int, num_bytes: int) -> tuple[int, int, SharedMemory]:
        """(memory id, offset, memory) of a tensor. Raises InvalidArgumentError if it is in none that was lent."""
        for start, end, memory_id, memory in self._lent:
            if start <= pointer and pointer + num_bytes <= end:
                return memory_id, pointer - start, memory
        raise InvalidArgumentError(
            must_be(name, "in memory of MoeRank.share with transport 'memory'", "elsewhere")
        )

    # ------------------------------------------------------------------------------ memory

    def lend(self, memory: SharedMemory) -> None:
        handle, memory_id = memory.handle, self._next_memory_id
        self._next_memory_id += 1
        request = pb.RegisterMemory(
            lease_serial=self._link.lease_serial,
            memory_id=memory_id,
            kind=handle.kind,
            handle=handle.payload,
            offset=handle.offset,
            num_bytes=handle.num_bytes,
            device=handle.device,
        )
        wait_s = self._link.info.limits.step_timeout_s + MARGIN_S
        self._link.ask(pb.ForwardRequest(register_memory=request), wait_s)
        start = memory.tensor(0, (1,), torch.uint8).data_ptr()
        self._lent.append((start, start + memory.num_bytes, memory_id, memory))

    def take_back(self, memory: SharedMemory) -> None:
        entry = next(one for one in self._lent if one[3] is memory)
        self._lent.remove(entry)
        request = pb.UnregisterMemory(lease_serial=self._link.lease_serial, memory_id=entry[2])
        wait_s = self._link.info.limits.step_timeout_s + MARGIN_S
        self._link.ask(pb.ForwardRequest(unregister_memory=request), wait_s)

    def close(self) -> None:
        self._ring.close()
        self._bell_page.close()
        self._lent.clear()


class RingCall:
    """A layer call in the ring."""

    __slots__ = ("_at", "_body", "_body_bytes", "_flags", "_num_rows", "_out", "_transport", "_wait_s")

    def __init__(
        self,
        transport: RingTransport,
        at: int,
        num_rows: int,
        flags: int,
        out: torch.Tensor,
        wait_s: float,
        body_bytes: int = LAYER_BODY_BYTES,
    ) -> None:
        self._transport = transport
        self._body_bytes = body_bytes
        self._at = at
        self._num_rows = num_rows
        self._flags = flags
        self._out = out
        self._wait_s = wait_s
        self._body = b""

    def wait(self) -> tuple[torch.Tensor, float, float]:
        ring, at = self._transport._ring, self._at
        try:
            ring.wait_for(at, self._wait_s)
            kind, body = ring.reply_of_call(at, self._body_bytes)
            if kind != ring_codec.R_LAYER:
                raise self._transport._error(
                    ring_codec.decode_reply(kind, body, self._transport._num_ranks, _NO_ROWS)
                )
            if self._num_rows and not self._flags & layout.FLAG_IN_MEMORY:
                ring.copy_out(at, self._num_rows, self._flags, self._out.data_ptr())
        finally:
            ring.end_call(at)
        self._body = body
        queue_us, total_us, _ = ring_codec.LAYER_REPLY_HEAD.unpack_from(body)
        return self._out, queue_us, total_us

    def reports(self) -> tuple[SubStepReport, ...]:
        return ring_codec.decode_reports(self._body, self._transport._num_ranks)


_NO_ROWS = torch.empty((0, 0), dtype=torch.bfloat16)


def _check(
    name: str, tensor: torch.Tensor | None, rows: int, columns: int, dtypes: tuple[torch.dtype, ...]
) -> None:
    """Raises InvalidArgumentError unless the tensor's bytes are [rows, columns] of one of the dtypes."""
    if tensor is None:
        raise InvalidArgumentError(must_be(name, f"[{rows}, {columns}]", None))
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgumentError(must_be(name, "a tensor", type(tensor).__name__))
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise InvalidArgumentError(must_be(f"{name}.dtype", wanted, str(tensor.dtype).removeprefix("torch.")))
    if tensor.shape != (rows, columns):
        raise InvalidArgumentError(must_be(f"{name}.shape", [rows, columns], list(tensor.shape)))
    if not tensor.is_contiguous():
        raise InvalidArgumentError(must_be(f"{name} strides", "contiguous", list(tensor.stride())))
