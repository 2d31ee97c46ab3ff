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
from megamoe.backends.cpu.routed import Int64Array, Outgoing, Received, RoutedRows, owners_of, routed_rows
from megamoe.backends.cpu.signals import INFO_FP8, INFO_ROWS_MASK, Phase
from megamoe.bundle import RowFormat
from megamoe.layout import FlagKind
from megamoe.shape import MX_BLOCK


def quantize(call: Call) -> None:
    """Stage this rank's rows as MXFP8 with ids and weights beside them, in private memory."""
    context, batch = call.rank_context, call.batch
    layout, shape = context.layout, context.layout.bundle.shape
    n, hidden, num_topk = batch.num_rows, shape.hidden, shape.num_topk
    rows = context.scratch.get("staged_rows", n, layout.row_bytes // WIDE.itemsize, WIDE)
    meta = context.scratch.get("staged_meta", n, layout.meta_words, torch.int32)
    u8 = rows.view(torch.uint8)
    codes, sf = u8[:, :hidden], u8[:, hidden : hidden + hidden // MX_BLOCK]
    if batch.hidden_states_sf is not None:
        codes.copy_(batch.hidden_states)
        sf.copy_(batch.hidden_states_sf)
        _mark_nan_blocks(codes, sf)
    else:
        mx.quantize_mxfp8_into(codes, sf, batch.hidden_states)
    meta[:, 0] = torch.arange(n, dtype=torch.int32)
    meta[:, 1 : 1 + num_topk] = batch.topk_ids
    meta[:, 1 + num_topk : 1 + 2 * num_topk] = batch.topk_weights.view(torch.int32)
    owners = owners_of(batch.topk_ids, shape)
    call.outgoing = Outgoing(rows, meta, owners)
    call.count("dropped_slots", int((owners < 0).sum()))


def _mark_nan_blocks(codes: torch.Tensor, sf: torch.Tensor) -> None:
    """Give blocks that hold a NaN code the scale NaN, in place: rows from outside may carry such codes, and owners
    look at scales only."""
    nan = codes.bitwise_and(0x7F).eq_(0x7F)
    if bool(nan.any()):
        sf.masked_fill_(nan.view(*sf.shape, MX_BLOCK).any(-1), mx.SCALE_NAN)


def write_rows(call: Call, dst_rank: int, tokens: Int64Array, first: int) -> None:
    """Write the rows of `tokens` and what stands beside them densely into dst_rank's slots from `first` on."""
    outgoing, buffer = call.outgoing, call.buffer_of(dst_rank)
    assert outgoing is not None
    count = len(tokens)
    if not count:
        return
    index = torch.from_numpy(tokens)
    torch.index_select(outgoing.rows, 0, index, out=buffer.rows[first : first + count])
    torch.index_select(outgoing.meta, 0, index, out=buffer.meta[first : first + count])
    layout = call.rank_context.layout
    call.count_sent(dst_rank, count * (layout.row_bytes + 4 * layout.meta_words))


def write_slots(call: Call, dst_rank: int, tokens: Int64Array, first: int) -> None:
    """Write the rows of `tokens` into their own slots (first + token) at dst_rank, and all rows' ids beside them:
    what an older launch left in the slots between is then never taken for this launch's ids."""
    outgoing, buffer = call.outgoing, call.buffer_of(dst_rank)
    assert outgoing is not None
    n = len(outgoing.owners)
    buffer.meta[first : first + n] = outgoing.meta
    if len(tokens) == n:
        buffer.rows[first : first + n] = outgoing.rows
    elif len(tokens):
        index = torch.from_numpy(tokens)
        buffer.rows[first : first + n].index_copy_(0, index, outgoing.rows.index_select(0, index))
    layout = call.rank_context.layout
    call.count_sent(dst_rank, len(tokens) * layout.row_bytes + n * 4 * layout.meta_words)


def find_rows(call: Call, blocks: Sequence[Received], *, auto_format: bool = False) -> RoutedRows:
    """Find this rank's routed rows and decide the format in which they go back."""
    context = call.rank_context
    call.routed = routed_rows(context.layout, call.rank, call.own_buffer.meta, blocks)
    call.count("rows_received", call.routed.num_rows)
    choose_format(
        call, call.routed.num_rows, int(call.routed.rows_per_expert.max(initial=0)), auto=auto_format
    )
    return call.routed


def choose_format(call: Call, num_rows: int, max_rows_of_expert: int, *, auto: bool = False) -> None:
    """bf16 or fp8 as agreed; `auto` is the one local choice (small_m) and is announced in the return flags."""
    deployment = call.rank_context.deployment
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
    return tiles_of(call.routed.rows_per_expert.tolist(), call.rank_context.gemms.block_m)


def intermediate_rows(call: Call, num_rows: int) -> torch.Tensor:
    inter = call.rank_context.layout.bundle.shape.intermediate
    return call.rank_context.scratch.get("intermediate", num_rows, inter + inter // MX_BLOCK, torch.uint8)


def result_rows(call: Call, num_rows: int) -> torch.Tensor:
    """[num_rows, result_bytes / 16] wide, private: result rows before they go back."""
    width = call.rank_context.layout.result_bytes // WIDE.itemsize
    return call.rank_context.scratch.get("results", num_rows, width, WIDE)


def load_rows(call: Call, payload_rows: Int64Array) -> torch.Tensor:
    """The received rows at `payload_rows`, decoded: float32 [m, hidden] in work space."""
    codes = call.own_buffer.rows.index_select(0, torch.from_numpy(payload_rows)).view(torch.uint8)
    return call.rank_context.gemms.decode(codes, call.rank_context.layout.bundle.shape.hidden)


def gemm1_chunk(call: Call, chunk: Sequence[Tile], payload_rows: Int64Array, out_u8: torch.Tensor) -> None:
    """GEMM1 of consecutive tiles: payload_rows [m] of the rows from chunk[0].start on; out_u8 [m, ...]."""
    for _ in chunk if call.hook else ():
        call.at("tile")
    if call.layer.w1 is not None:
        base = chunk[0].start
        call.rank_context.gemms.gemm1(call.layer, chunk, base, load_rows(call, payload_rows), out_u8)


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
        y = call.rank_context.gemms.gemm2(call.layer, chunk, chunk[0].start, h_u8)
    fp8 = call.owner_format is RowFormat.FP8
    encode_results(y, out_wide, torch.from_numpy(weights) if fp8 else None)


def gemm1_all(call: Call, tiles: Sequence[Tile]) -> None:
    """GEMM1 of all routed rows, chunk by chunk, into intermediate_rows."""
    routed = call.routed
    assert routed is not None
    h_u8 = intermediate_rows(call, routed.num_rows)
    for chunk in call.rank_context.gemms.chunks(tiles):
        part = slice(chunk[0].start, chunk[-1].stop)
        gemm1_chunk(call, chunk, routed.payload_row[part], h_u8[part])


def gemm2_all(call: Call, tiles: Sequence[Tile]) -> torch.Tensor:
    """GEMM2 of all routed rows; the encoded results, in the order of call.routed."""
    routed = call.routed
    assert routed is not None
    h_u8 = intermediate_rows(call, routed.num_rows)
    results = result_rows(call, routed.num_rows)
    for chunk in call.rank_context.gemms.chunks(tiles):
        part = slice(chunk[0].start, chunk[-1].stop)
        gemm2_chunk(call, chunk, routed.payload_row[part], routed.weights[part], h_u8[part], results[part])
    return results


# ------------------------------------------------------------------------------------------------ results


def begin_return(call: Call) -> None:
    """The last look before this rank writes into its peers' memory: if they gave up, this raises."""
    call.signals.check_in_time()
    call.signals.advance(Phase.RETURNED)


def return_rows(
    call: Call, src_rank: int, results: torch.Tensor, index: Int64Array, *, ring: bool = False
) -> None:
    """Write result rows [m] to their (token, slot) places at src_rank and post the return flag."""
    if len(index):
        call.buffer_of(src_rank).results.index_copy_(0, torch.from_numpy(index), results)
        call.count_sent(src_rank, len(index) * call.rank_context.layout.result_bytes)
    call.post(src_rank, FlagKind.RETURN, ring=ring)


def return_all(call: Call, results: torch.Tensor) -> None:
    """Send all computed rows back, source by source."""
    assert call.routed is not None
    begin_return(call)
    positions = call.routed.by_source(call.num_ranks)
    for src_rank in call.peers_in_turn():
        mine = positions[src_rank]
        rows = results.index_select(0, torch.from_numpy(mine)) if len(mine) else results[:0]
        return_rows(call, src_rank, rows, call.routed.result_index[mine])
    call.at("returned")


def rows_sent_by(call: Call, src_rank: int) -> int:
    """Payload rows that src_rank announced in its payload flag (its token count where slots are fixed)."""
    return call.signals.info(FlagKind.PAYLOAD, src_rank) & INFO_ROWS_MASK


def formats_of(return_infos: Sequence[int]) -> tuple[RowFormat, ...]:
    """Row format per owner, from the info bits of the return flags."""
    return tuple(RowFormat.FP8 if info & INFO_FP8 else RowFormat.BF16 for info in return_infos)


def combine_all(call: Call) -> None:
    """Wait for every owner, then sum all tokens."""
    call.signals.wait(FlagKind.RETURN, range(call.num_ranks))
    call.at("combine")
    infos = [call.signals.info(FlagKind.RETURN, rank) for rank in range(call.num_ranks)]
    combine_tokens(call, formats_of(infos), None)
