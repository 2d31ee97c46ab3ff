"""`TRITON_INTERPRET=1 python -m tests.hopper.interpreted`: kernels that move rows, in Triton's interpreter on a CPU.

Two ranks take turns (megamoe.backends.hopper.lockstep), their experts give rows back. Prints one JSON object: what is
not the oracle's or the references', bit for bit, and how much was compared. What only PTX can say is played here.
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from megamoe import Deployment, MoeBatch, MoeShape, Path, RowFormat, mx, plan_bundle
from megamoe.backends.hopper import launches, references
from megamoe.backends.hopper.kernels import Device, Kernels
from megamoe.backends.hopper.lockstep import IDENTITY, Lockstep
from megamoe.backends.hopper.plan import BLOCK_ROWS, Counter, GemmPlan
from megamoe.reference import identity_moe
from megamoe.routing import route_rank


def _scaled_pair(codes: Any, scale: Any) -> np.ndarray[Any, Any]:
    """What expand.SCALED_PAIR says: two e4m3 codes times a scale, as a pair of bf16."""
    both = torch.from_numpy(codes.reshape(-1).view(np.uint8).reshape(*codes.shape, 2))
    rows = (both.view(torch.float8_e4m3fn).float() * torch.from_numpy(scale).unsqueeze(-1)).bfloat16()
    return rows.view(torch.int32)[..., 0].numpy()


def _codes_of(words: Any) -> torch.Tensor:
    """int32 [...] -> fp32 [..., 4]: their e4m3 codes."""
    codes = torch.from_numpy(np.ascontiguousarray(words)).view(torch.uint8).view(*words.shape, 4)
    return codes.view(torch.float8_e4m3fn).float()


def _largest(words: Any) -> np.ndarray[Any, Any]:
    """What expand_fp8.LARGEST says."""
    return _codes_of(words).abs().amax(-1).numpy()


def _scaled(words: Any, factor: Any) -> np.ndarray[Any, Any]:
    """What expand_fp8.SCALED says."""
    codes = (_codes_of(words) * torch.from_numpy(factor).unsqueeze(-1)).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8)[..., [0, 2, 1, 3]].contiguous().view(torch.int32)[..., 0].numpy()


def _inline_asm(
    text: Any, constraints: str, args: Any, dtype: Any, is_pure: bool, pack: int, _semantic: Any = None
) -> Any:
    """All that these kernels say in PTX: clocks, fences, a product that must not be fused, e4m3 codes."""
    text = getattr(text, "value", text)
    for word, compute in (("abs.f16x2", _largest), ("satfinite", _scaled), ("bf16x2", _scaled_pair)):
        if word in text:
            made = TensorHandle(compute(*(arg.handle.data for arg in args)), dtype)
            return tl.core.tensor(made, tl.block_type(dtype, args[0].shape))
    if "mul.rn" in text:
        return args[0] * args[1]
    waits = ("fence", "griddepcontrol")
    assert "globaltimer" in text or any(word in text for word in waits), text
    value = time.monotonic_ns() if "globaltimer" in text else 0
    kind = np.int64 if dtype == tl.int64 else np.int32
    return tl.core.tensor(TensorHandle(np.array([value], dtype=kind), dtype), dtype)


_splat = InterpreterBuilder.create_splat


def _repeated(self: Any, kind: Any, value: Any) -> Any:
    """A truth value that is repeated stays one: Triton 3.9's interpreter makes it an integer, which is no mask."""
    made = _splat(self, kind, value)
    return TensorHandle(made.data.astype(bool), made.dtype) if value.data.dtype == bool else made


SHAPE = MoeShape(hidden=544, intermediate=64, num_experts=10, num_topk=3, num_ranks=2)
"""Not a multiple of any block; experts and top-k are no powers of two."""
COUNTS = (5, 0), (16, 13)
RUNS = (Path.FIXED_SLOT, RowFormat.BF16), (Path.COMPACT, RowFormat.FP8)
CPU = torch.device("cpu")
TABLES = ("row_slot", "row_weight", "block_info", "work")


def batches(counts: tuple[int, ...], seed: int) -> list[MoeBatch]:
    """Rows that MXFP8 holds exactly, with power-of-two weights: transport must be bitwise. seed: even = quantized."""
    out = []
    for rank, rows in enumerate(counts):
        generator = torch.Generator().manual_seed(100 * seed + rank)
        ids, weights = route_rank(
            SHAPE, "uniform", rows, seed=seed, rank=rank, no_expert_share=0.2, duplicate_share=0.2
        )
        x = torch.randint(-8, 9, (rows, SHAPE.hidden), generator=generator).bfloat16()
        weights = torch.exp2(torch.randint(-2, 2, weights.shape, generator=generator).float())
        parts = (
            (x, ids, weights)
            if seed % 2
            else (mx.quantize_mxfp8(x)[0], ids, weights, mx.quantize_mxfp8(x)[1])
        )
        out.append(MoeBatch.of(SHAPE, *parts))
    return out


def same_images(group: Lockstep, other: Lockstep, rank: int, stream_max_rows: int, *, compact: bool) -> bool:
    """expand alone, for both kinds of GEMM: the references index, the kernel and its reference expand."""
    plan = GemmPlan(stream_max_rows=stream_max_rows, block_n=32)
    for one in (group, other):
        references.index(one.group, rank, plan, compact=compact)
    group.kernels[rank].expand(plan)
    references.expand(other.group, rank)
    got, want = (one.group.ranks[rank] for one in (group, other))
    rows = BLOCK_ROWS * int(want.work[Counter.NUM_BLOCKS])
    return torch.equal(got.image[:rows].view(torch.int16), want.image[:rows].view(torch.int16))


def same_operands(group: Lockstep, other: Lockstep, rank: int, *, compact: bool) -> bool:
    """expand and regroup for the FP8 kernel, with something of GEMM1's between them."""
    plan = GemmPlan(stream_max_rows=0, block_n=256, is_fp8=True)
    generator = torch.Generator().manual_seed(rank)
    for one in (group, other):
        references.index(one.group, rank, plan, compact=compact)
    got, want = (one.group.ranks[rank].fp8 for one in (group, other))
    x = torch.randn(want.middle.shape, generator=generator) * torch.exp2(
        torch.randint(-20, 9, want.exponents.T.shape, generator=generator).float()
    ).repeat_interleave(mx.BLOCK, 1)
    x[2, 70] = float("nan")
    codes, scales = mx.quantize_mxfp8(x)
    for operands in (got, want):
        operands.middle.copy_(codes)
        operands.exponents.copy_(scales.T)
    group.kernels[rank].expand(plan)
    group.kernels[rank].regroup()
    references.expand_fp8(other.group, rank)
    references.regroup(other.group, rank)
    rows = BLOCK_ROWS * int(other.group.ranks[rank].work[Counter.NUM_BLOCKS])
    codes_and_scales = (
        ((got.rows, want.rows), (got.features, want.features)),
        (
            (got.row_scales, want.row_scales),
            (got.feature_scales, want.feature_scales),
        ),
    )
    same = [
        torch.equal(a[:rows].view(torch.uint8), b[:rows].view(torch.uint8)) for a, b in codes_and_scales[0]
    ]
    same += [
        torch.equal(a[:, :rows].contiguous().view(torch.int32), b[:, :rows].contiguous().view(torch.int32))
        for a, b in codes_and_scales[1]
    ]
    for one in (group, other):
        one.group.ranks[rank].work.zero_()  # of widths that other plans do not have
    return all(same)


def compare(path: Path, row_format: RowFormat) -> dict[str, bool]:
    """By what is compared: whether it is the same."""
    deployment = Deployment(
        shape=SHAPE,
        backend="hopper",
        max_tokens_per_rank=16,
        fixed_slot_max=16,
        combine_row_format=row_format,
        large_m_capacity=32,
    )
    kernels, plain = (Lockstep(plan_bundle(deployment), CPU) for _ in range(2))
    kernels.kernels = [Kernels(rank, Device(2, 2), row_format) for rank in kernels.group.ranks]
    found: dict[str, bool] = {}
    for number, counts in enumerate(COUNTS):
        rows = batches(counts, number)
        got, _ = (
            one.forward(rows, [IDENTITY] * 2, path, epoch=0x7FFFFFFF + number) for one in (kernels, plain)
        )
        for rank, (mine, theirs) in enumerate(zip(kernels.group.ranks, plain.group.ranks, strict=True)):
            where = f"{path} {row_format} {counts} rank {rank}"
            found[f"{where}: result"] = torch.equal(got[rank], identity_moe(rows[rank], SHAPE, row_format))
            for name in TABLES:
                found[f"{where}: {name}"] = torch.equal(getattr(mine, name), getattr(theirs, name))
            for most in (32, 0):
                same = same_images(kernels, plain, rank, most, compact=path is Path.COMPACT)
                found[f"{where}: image, streaming up to {most}"] = same
            same = same_operands(kernels, plain, rank, compact=path is Path.COMPACT)
            found[f"{where}: FP8 operands"] = same
    return found


def main() -> None:
    tl.inline_asm_elementwise = _inline_asm
    InterpreterBuilder.create_splat = _repeated
    # Keys are of compiled kernels.
    launches.settle_keys = lambda: None
    found = {}
    for run in RUNS:
        found |= compare(*run)
    print(json.dumps({"compared": len(found), "wrong": [what for what, same in found.items() if not same]}))


if __name__ == "__main__":
    main()
