"""The stages that paths are made of: quantize, send, find rows, GEMMs, return, combine. Paths order and wait."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megamoe import mx
from megamoe.backends.cpu.call import Call
from megamoe.backends.cpu.combine import combine_tokens
from megamoe.backends.cpu.experts import Tile, encode_results, tiles_of
from megamoe.backends.cpu.heap import WIDE
from megamoe.backends.cpu.routed import Int64Array, Outgoing, Received, RoutedRows, routed_rows
from megamoe.backends.cpu.signals import Phase
from megamoe.bundle import RowFormat
from megamoe.layout import INFO_FP8, INFO_ROWS_MASK, FlagKind
from megamoe.shape import MX_BLOCK


def quantize(call: Call) -> None:
    """Stage this rank's rows as MXFP8 with token index, ids and weights beside them, and see who gets them."""
    batch, shape = call.batch, call.shape
    n, hidden, num_topk = batch.num_rows, shape.hidden, shape.num_topk
    staging = call.context.staging
    rows, meta = staging.rows[:n], staging.meta[:n]
    u8 = rows.view(torch.uint8)
    codes, sf = u8[:, :hidden], u8[:, hidden : hidden + hidden // MX_BLOCK]
    if batch.hidden_states_sf is not None:
        codes.copy_(batch.hidden_states)
        sf.copy_(batch.hidden_states_sf)
        _mark_nan_blocks(codes, sf)
    else:
        mx.quantize_mxfp8_into(codes, sf, batch.hidden_states)
    words = meta.numpy()
    words[:, 1 : 1 + num_topk] = batch.topk_ids.numpy()
    words[:, 1 + num_topk : 1 + 2 * num_topk] = batch.topk_weights.numpy().view(np.int32)
    call.outgoing = Outgoing.of(shape, batch.topk_ids, rows, meta)
    call.count("dropped_slots", int((call.outgoing.owners < 0).sum()))


def _mark_nan_blocks(codes: torch.Tensor, sf: torch.Tensor) -> None:
    """Give blocks that hold a NaN code the scale NaN, in place: rows from outside may carry such codes, and owners
    look at scales only."""
    nan = codes.bitwise_and(0x7F) == 0x7F
    if bool(nan.any()):
        sf.masked_fill_(nan.view(*sf.shape, MX_BLOCK).any(-1), mx.SCALE_NAN)


# ------------------------------------------------------------------------------------------------ dispatch


def write_dense(call: Call, bases: Int64Array) -> None:
    """Write this rank's rows, and what stands beside them, packed from bases[dst_rank] on at each destination."""
    outgoing = call.outgoing
    assert outgoing is not None
    where = (torch.from_numpy(outgoing.dst_rank), torch.from_numpy(outgoing.dense_slots(bases)))
    token = torch.from_numpy(outgoing.token)
    call.buffer.rows.index_put_(where, outgoing.rows.index_select(0, token))
    call.buffer.meta.index_put_(where, outgoing.meta.index_select(0, token))
    layout = call.context.layout
    sent = len(outgoing.token) - int(outgoing.rows_per_rank[call.rank])
    call.bytes_sent += sent * (layout.row_bytes + 4 * layout.meta_words)


def write_slots(call: Call, first: int) -> None:
    """Write this rank's rows into their own slots (first + token) at their owners, and all rows' ids everywhere:
    what an older launch left in the slots between is then never taken for this launch's ids."""
    outgoing = call.outgoing
    assert outgoing is not None
    n = len(outgoing.owners)
    call.buffer.meta[:, first : first + n] = outgoing.meta
    where = (torch.from_numpy(outgoing.dst_rank), torch.from_numpy(outgoing.token + first))
    call.buffer.rows.index_put_(where, outgoing.rows.index_select(0, torch.from_numpy(outgoing.token)))
    layout = call.context.layout
    sent = len(outgoing.token) - int(outgoing.rows_per_rank[call.rank])
    call.bytes_sent += sent * layout.row_bytes + (call.num_ranks - 1) * n * 4 * layout.meta_words


def find_rows(call: Call, blocks: Sequence[Received], *, auto_format: bool = False) -> RoutedRows:
    """Find this rank's routed rows and decide the format in which they go back."""
    words = call.buffer.meta[call.rank].numpy()
    call.routed = routed = routed_rows(call.context.layout, call.rank, words, blocks)
    call.count("rows_received", routed.num_rows)
    choose_format(call, routed.num_rows, int(routed.rows_per_expert.max()), auto=auto_format)
    return routed


def rows_sent_by(call: Call, src_rank: int) -> int:
    """Payload rows that src_rank announced in its payload flag (its token count where slots are fixed)."""
    return call.signals.info(FlagKind.PAYLOAD, src_rank) & INFO_ROWS_MASK


def choose_format(call: Call, num_rows: int, max_rows_of_expert: int, *, auto: bool = False) -> None:
    """bf16 or fp8 as agreed; `auto` is the one local choice (small_m) and is announced in the return flags."""
    deployment = call.context.deployment
    wanted = deployment.combine_row_format
    if wanted is RowFormat.AUTO:
        skewed = (
            num_rows >= deployment.auto_fp8_min_rows
            or max_rows_of_expert >= deployment.auto_fp8_min_rows_of_expert
        )
        wanted = RowFormat.FP8 if auto and skewed else RowFormat.BF16
    call.owner_format = wanted


# ------------------------------------------------------------------------------------------------ GEMMs


def all_tiles(call: Call) -> list[Tile]:
    assert call.routed is not None
    return tiles_of(call.routed.rows_per_expert.tolist(), call.context.gemms.block_m)


def intermediate_rows(call: Call, num_rows: int) -> torch.Tensor:
    inter = call.shape.intermediate
    return call.context.scratch.get("intermediate", num_rows, inter + inter // MX_BLOCK, torch.uint8)


def result_rows(call: Call, num_rows: int) -> torch.Tensor:
    """[num_rows, result_bytes / 16] wide, private: result rows before they go back."""
    width = call.context.layout.result_bytes // WIDE.itemsize
    return call.context.scratch.get("results", num_rows, width, WIDE)


def load_rows(call: Call, payload_rows: Int64Array) -> torch.Tensor:
    """The received rows at `payload_rows`, decoded: float32 [m, hidden] in work space."""
    codes = call.buffer.rows[call.rank].index_select(0, torch.from_numpy(payload_rows)).view(torch.uint8)
    return call.context.gemms.decode(codes, call.shape.hidden)


def gemm1_chunk(call: Call, chunk: Sequence[Tile], payload_rows: Int64Array, out_u8: torch.Tensor) -> None:
    """GEMM1 of consecutive tiles: payload_rows [m] of the rows from chunk[0].start on; out_u8 [m, ...]."""
    for _ in chunk if call.hook else ():
        call.at("tile")
    if call.layer.w1 is not None:
        base = chunk[0].start
        call.context.gemms.gemm1(call.layer, chunk, base, load_rows(call, payload_rows), out_u8)


def gemm2_chunk(
    call: Call,
    chunk: Sequence[Tile],
    payload_rows: Int64Array,
    weights: np.ndarray,
    h_u8: torch.Tensor,
    out_wide: torch.Tensor,
) -> None:
    """GEMM2 of consecutive tiles, rows encoded in the owner's format. Identity experts take the payload row."""
    if call.layer.w2 is None:
        y = load_rows(call, payload_rows)
    else:
        y = call.context.gemms.gemm2(call.layer, chunk, chunk[0].start, h_u8)
    fp8 = call.owner_format is RowFormat.FP8
    encode_results(y, out_wide, torch.from_numpy(weights) if fp8 else None)


def gemm1_all(call: Call, tiles: Sequence[Tile]) -> None:
    """GEMM1 of all routed rows, chunk by chunk, into intermediate_rows."""
    routed = call.routed
    assert routed is not None
    h_u8 = intermediate_rows(call, routed.num_rows)
    for chunk in call.context.gemms.chunks(tiles):
        part = slice(chunk[0].start, chunk[-1].stop)
        gemm1_chunk(call, chunk, routed.payload_row[part], h_u8[part])


def gemm2_all(call: Call, tiles: Sequence[Tile]) -> torch.Tensor:
    """GEMM2 of all routed rows; the encoded results, in the order of call.routed."""
    routed = call.routed
    assert routed is not None
    h_u8 = intermediate_rows(call, routed.num_rows)
    results = result_rows(call, routed.num_rows)
    for chunk in call.context.gemms.chunks(tiles):
        part = slice(chunk[0].start, chunk[-1].stop)
        gemm2_chunk(call, chunk, routed.payload_row[part], routed.weights[part], h_u8[part], results[part])
    return results


# ------------------------------------------------------------------------------------------------ results


def begin_return(call: Call) -> None:
    """The last look before this rank writes into its peers' memory: if they gave up, this raises."""
    call.signals.check_in_time()
    call.signals.advance(Phase.RETURNED)


def return_all(call: Call, results: torch.Tensor) -> None:
    """Write all computed rows to their (token, slot) places at their sources, and tell every source."""
    routed = call.routed
    assert routed is not None
    begin_return(call)
    where = (torch.from_numpy(routed.src_rank), torch.from_numpy(routed.result_index))
    call.buffer.results.index_put_(where, results)
    own = int(np.count_nonzero(routed.src_rank == call.rank))
    call.bytes_sent += (routed.num_rows - own) * call.context.layout.result_bytes
    for src_rank in call.peers_in_turn:
        call.post(src_rank, FlagKind.RETURN)
    call.at("returned")


def return_rows(call: Call, src_rank: int, results: torch.Tensor, index: Int64Array) -> None:
    """Write one source's result rows [m] to their places, and ring for it."""
    if len(index):
        call.buffer.results[src_rank].index_copy_(0, torch.from_numpy(index), results)
        if src_rank != call.rank:
            call.bytes_sent += len(index) * call.context.layout.result_bytes
    call.post(src_rank, FlagKind.ROWS, ring=True)


def formats_of(return_infos: Sequence[int]) -> tuple[RowFormat, ...]:
    """Row format per owner, from the info bits of the return flags."""
    return tuple(RowFormat.FP8 if info & INFO_FP8 else RowFormat.BF16 for info in return_infos)


def infos(call: Call, kind: FlagKind) -> list[int]:
    """Info bits of all ranks' flags of a kind; of no meaning where a flag is not there yet."""
    return [call.signals.info(kind, rank) for rank in range(call.num_ranks)]


def combine_all(call: Call) -> None:
    """Wait for every owner, then sum all tokens."""
    call.signals.wait(FlagKind.RETURN, range(call.num_ranks))
    call.at("combine")
    combine_tokens(call, formats_of(infos(call, FlagKind.RETURN)), None)
