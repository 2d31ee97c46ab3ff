"""FlyDSL kernels for the tests: a scaled-MFMA GEMM, an exchange between ranks, loads straight into LDS."""

# ruff: noqa: E501  (tables of cases read best with one case a line)

# mypy: ignore-errors
# ruff: noqa: E402, B008

from .toolchain import prepare_flydsl

prepare_flydsl()

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import gpu, range_constexpr, rocdl
from flydsl.expr.typing import Vector as Vec


def pointer(address, kind, alignment):
    return fx.inttoptr(
        fx.PointerType.get(elem_ty=kind.ir_type, address_space=fx.AddressSpace.Global, alignment=alignment),
        address,
    )


@fx.struct
class TileLds:
    a: fx.Array[fx.Int32, 16 * 32, 16]


@flyc.kernel(known_block_size=[64, 1, 1])
def mx_gemm(
    A: fx.Int64, B: fx.Int64, SA: fx.Int64, SB: fx.Int64, C: fx.Int64, N: fx.Int32, K: fx.Constexpr[int]
):
    """One wave per 16x16 tile: A MXFP8 through LDS, B MXFP4, E8M0 scales, bf16 out."""
    lane = fx.thread_idx.x
    tile_m, tile_n = fx.block_idx.x, fx.block_idx.y
    row, quarter = lane % 16, lane // 16
    lds = fx.SharedAllocator().allocate(TileLds).peek()
    a, b = pointer(A, fx.Int32, 16), pointer(B, fx.Int32, 16)
    scale_a, scale_b = pointer(SA, fx.Uint8, 1), pointer(SB, fx.Uint8, 1)
    zero = Vec.filled(4, 0.0, fx.Float32)
    for k, state in range(fx.Int32(0), fx.Int32(K // 128), fx.Int32(1), init=[zero]):
        acc = state[0]
        k = fx.Int32(k)
        at = (tile_m * 16 + row) * (K // 4) + k * 32 + quarter * 4
        slot = lds.a.ptr + (row * 32 + quarter * 8)
        fx.generic_store(slot, fx.generic_load(a + at, count=4))
        fx.generic_store(slot + 4, fx.generic_load(a + (at + 16), count=4))
        gpu.barrier()
        low, high = fx.generic_load(slot, count=4), fx.generic_load(slot + 4, count=4)
        left = Vec.from_elements(
            [low[i] for i in range_constexpr(4)] + [high[i] for i in range_constexpr(4)], fx.Int32
        )
        four = fx.generic_load(
            b + ((tile_n * 16 + row) * (K // 8) + k * 16 + quarter * 4), count=4, nontemporal=True
        )
        pad = fx.Int32(0)
        right = Vec.from_elements([four[i] for i in range_constexpr(4)] + [pad, pad, pad, pad], fx.Int32)
        sa = fx.Int32(
            fx.generic_load(scale_a + ((tile_m * 16 + row) * (K // 32) + k * 4 + quarter), dtype=fx.Uint8)
        )
        sb = fx.Int32(
            fx.generic_load(scale_b + ((tile_n * 16 + row) * (K // 32) + k * 4 + quarter), dtype=fx.Uint8)
        )
        result = rocdl.mfma_scale_f32_16x16x128_f8f6f4(
            Vec.make_type(4, fx.Float32), [left, right, acc, 0, 4, 0, sa, 0, sb]
        )
        gpu.barrier()
        res = yield [Vec(result, (4,), fx.Float32)]
    out = (
        Vec(res, (4,), fx.Float32)
        if not isinstance(res, (list, tuple, Vec))
        else (res[0] if isinstance(res, (list, tuple)) else res)
    )
    c = pointer(C, fx.BFloat16, 2)
    for i in range_constexpr(4):
        fx.generic_store(c + ((tile_m * 16 + quarter * 4 + i) * N + tile_n * 16 + row), fx.BFloat16(out[i]))


@flyc.jit
def launch_mx_gemm(
    A: fx.Int64,
    B: fx.Int64,
    SA: fx.Int64,
    SB: fx.Int64,
    C: fx.Int64,
    M: fx.Int32,
    N: fx.Int32,
    K: fx.Constexpr[int],
    stream: fx.Stream = fx.Stream(None),
):
    mx_gemm(A, B, SA, SB, C, N, K).launch(grid=(M // 16, N // 16, 1), block=(64, 1, 1), stream=stream)


@flyc.kernel(known_block_size=[256, 1, 1])
def exchange(
    table: fx.Int64,
    source: fx.Int64,
    out: fx.Int64,
    rank: fx.Int32,
    epoch: fx.Int32,
    num_ranks: fx.Constexpr[int],
):
    """Workgroup p copies 4 KiB to slot `rank` of peer p, raises that peer's flag, waits for peer p's, and copies its slot out."""
    item, peer = fx.thread_idx.x, fx.block_idx.x
    table_ptr = pointer(table, fx.Int64, 8)
    theirs, mine = fx.generic_load(table_ptr + peer), fx.generic_load(table_ptr + rank)
    data = fx.generic_load(pointer(source, fx.Int32, 16) + item * 4, count=4)
    fx.generic_store(pointer(theirs, fx.Int32, 16) + (rank * 1024 + item * 4), data, nontemporal=True)
    rocdl.s_waitcnt(0)
    gpu.barrier()
    if item == 0:
        fx.memory_fence(ordering=fx.AtomicOrdering.Release)
        flag = pointer(theirs + fx.Int64(4096 * num_ranks), fx.Int32, 4) + rank
        fx.generic_store(flag, epoch, memory_order=fx.AtomicOrdering.Release, volatile=True)
        wanted = pointer(mine + fx.Int64(4096 * num_ranks), fx.Int32, 4) + peer
        seen = fx.generic_load(wanted, memory_order=fx.AtomicOrdering.Monotonic, volatile=True)
        while seen != epoch:
            rocdl.s_sleep(2)
            seen = fx.generic_load(wanted, memory_order=fx.AtomicOrdering.Monotonic, volatile=True)
        fx.memory_fence(ordering=fx.AtomicOrdering.Acquire)
    gpu.barrier()
    got = fx.generic_load(pointer(mine, fx.Int32, 16) + (peer * 1024 + item * 4), count=4)
    fx.generic_store(pointer(out, fx.Int32, 16) + (peer * 1024 + item * 4), got)


@flyc.jit
def launch_exchange(
    table: fx.Int64,
    source: fx.Int64,
    out: fx.Int64,
    rank: fx.Int32,
    epoch: fx.Int32,
    num_ranks: fx.Constexpr[int],
    stream: fx.Stream = fx.Stream(None),
):
    exchange(table, source, out, rank, epoch, num_ranks).launch(
        grid=(num_ranks, 1, 1), block=(256, 1, 1), stream=stream
    )


@fx.struct
class DmaLds:
    a: fx.Array[fx.Int32, 1024, 16]


@flyc.kernel(known_block_size=[256, 1, 1])
def dma(A: fx.Int64, C: fx.Int64):
    """4 KiB straight into LDS, out again with the items reversed."""
    item = fx.thread_idx.x
    lds = fx.SharedAllocator().allocate(DmaLds).peek()
    atom = fx.make_copy_atom(rocdl.cdna4.GlobalLoadAsyncLDS128b(), fx.Int32)
    source = fx.make_view(pointer(A, fx.Int32, 16) + item * 4, fx.make_layout(4, 1))
    target = fx.make_view(lds.a.ptr + item // 64 * 256, fx.make_layout(4, 1))
    fx.copy_atom_call(atom, source, target)
    rocdl.asyncmark()
    rocdl.wait_asyncmark(0)
    gpu.barrier()
    fx.generic_store(
        pointer(C, fx.Int32, 16) + item * 4,
        fx.generic_load(lds.a.ptr + (255 - item) * 4, count=4),
        nontemporal=True,
    )


@flyc.jit
def launch_dma(A: fx.Int64, C: fx.Int64, stream: fx.Stream = fx.Stream(None)):
    dma(A, C).launch(grid=(1, 1, 1), block=(256, 1, 1), stream=stream)
