"""FP8 operands: what fits, what the kernel's instructions make of a word, in which order, and when FP8 serves."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import pytest
import torch

from megamoe import Deployment, Path, RowFormat, mx, plan_bundle, preset, random_layer_weights, shard
from megamoe.backends.hopper import fp8, fragments_fp8, packing
from megamoe.backends.hopper.buffers import BoundLayer
from megamoe.backends.hopper.fp8_operands import Fp8Operands
from megamoe.backends.hopper.lockstep import Lockstep
from megamoe.backends.hopper.plan import FP8_MIN_MEAN_ROWS, GemmPlan, plan_gemms
from megamoe.backends.hopper.selftest import cases
from megamoe.backends.hopper.served import gemm_plan, gemm_plans
from megamoe.reference import QUANTIZED_REL_L2, quantized_moe, relative_l2, tolerance
from tests.hopper.test_references import SHAPE, batches

PLAN = GemmPlan(stream_max_rows=0, block_n=256, is_fp8=True)
V4_PRO = preset("deepseek-v4-pro")
WORD = 0xFFFFFFFF


def matrix(
    rows: int = 128, columns: int = 512, scales: range = range(110, 122)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [1, rows, columns / 2] and scales, each row with both ends of `scales`."""
    generator = torch.Generator().manual_seed(rows + columns)
    codes = torch.randint(0, 256, (1, rows, columns // 2), generator=generator, dtype=torch.uint8)
    sf = torch.randint(
        scales.start, scales.stop, (1, rows, columns // 32), generator=generator, dtype=torch.uint8
    )
    sf[..., 0], sf[..., 1] = scales.start, scales.stop - 1
    return codes, sf


def execute(line: str, registers: dict[str, int]) -> None:
    """One PTX instruction of those that decode uses."""
    name, operands = line.rstrip(";").split(None, 1)
    out, *given = (text.strip() for text in operands.split(","))
    values = [registers[text] if text in registers else int(text, 0) for text in given]
    if name == "prmt.b32":
        source = values[0] | values[1] << 32
        selectors = [values[2] >> 4 * i & 15 for i in range(4)]
        assert max(selectors) < 8, "a selector with bit 3 copies signs"
        registers[out] = sum((source >> 8 * at & 0xFF) << 8 * i for i, at in enumerate(selectors))
        return
    compute = {
        "and.b32": lambda a, b: a & b,
        "shl.b32": lambda a, b: a << b,
        "shr.u32": lambda a, b: a >> b,
        "shf.r.wrap.b32": lambda low, high, by: (low | high << 32) >> by,
        "lop3.b32": lambda a, b, c, table: a | b & c if table == 0xF8 else None,
    }[name]
    registers[out] = compute(*values) & WORD


def decoded_by_ptx(word: int, shift: tuple[int, int]) -> list[int]:
    """Registers of rows g and g + 8."""
    tables = [fp8.TABLE[half] + by * fp8.TABLE_STEP[half] & WORD for by in shift for half in range(2)]
    registers = {"w": word, **{f"t{i}": table for i, table in enumerate(tables)}}
    for line in fragments_fp8.decode("w", ("g", "h"), ("t0", "t1", "t2", "t3")):
        execute(line, registers)
    return [registers["g"], registers["h"]]


def test_instructions_and_twin_decode_every_code_exactly() -> None:
    generator = torch.Generator().manual_seed(1)
    nibbles = torch.randint(0, 16, (64, 4, 2), generator=generator, dtype=torch.int32)
    nibbles[:16] = torch.arange(16, dtype=torch.int32)[:, None, None]
    words = packing._words(nibbles)
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([values, -values])
    for low, high in product((fp8.MIN_SHIFT, 0, fp8.MAX_SHIFT), repeat=2):
        twin = fp8.decode_words(words, (low, high))
        ptx = torch.tensor([decoded_by_ptx(int(word) & WORD, (low, high)) for word in words])
        twin_words = twin.view(torch.uint8).contiguous().view(torch.int32).squeeze(-1).long() & WORD
        assert torch.equal(ptx, twin_words)
        for row, by in enumerate((low, high)):
            codes = nibbles[:, row::2].flatten(1)[:, [0, 2, 1, 3]]
            assert torch.equal(twin[:, row].float(), values[codes.long()] * 2.0**by)


def test_operands_of_snippets() -> None:
    for text, constraints in (fragments_fp8.decode_words(), fragments_fp8.as_bytes()):
        used = {int(number) for number in re.findall(r"\$(\d+)", text)}
        assert used == set(range(len(constraints.split(","))))


def dense_of(packed: packing.PackedMatrix) -> torch.Tensor:
    """fp32 [rows, columns] of expert 0 as the FP8 kernel has it: e4m3 values times the row's factor."""
    assert packed.fp8 is not None
    nibbles_times = packing.unpack_matrix(replace(packed, out_factor=torch.ones(1)))[0]
    factor = packed.fp8.factor[0].unsqueeze(1)
    codes = nibbles_times / (factor / packed.out_factor[0])
    assert torch.equal(codes.to(torch.float8_e4m3fn).float(), codes), "not exact in e4m3"
    return codes.to(torch.float8_e4m3fn).float() * factor


@pytest.mark.parametrize("start", [14, 110, 240])
def test_scales_twelve_octaves_apart_fit_exactly(start: int) -> None:
    codes, sf = matrix(scales=range(start, start + 12))
    packed = packing.pack_w2(codes, sf)
    assert torch.equal(dense_of(packed), mx.dequantize_mxfp4(codes, sf)[0])


def test_what_does_not_fit() -> None:
    codes, sf = matrix(scales=range(110, 122))
    sf[0, 77, 5] = 109
    codes[0, 77, 80:96] = 0x11
    assert packing.pack_w2(codes, sf).fp8 is None, "13 octaves in a row"
    codes[0, 77, 80:96] = 0x80
    assert packing.pack_w2(codes, sf).fp8 is not None, "a block of zeros has no scale"
    sf[0, 77, 5] = mx.SCALE_NAN
    assert packing.pack_w2(codes, sf).fp8 is None, "a NaN scale"
    assert packing.pack_w2(*matrix(scales=range(1, 3))).fp8 is None, "a factor that is not a normal number"
    assert packing.pack_w2(torch.zeros_like(codes), torch.full_like(sf, 3)).fp8 is not None, "zeros"


def test_one_expert_that_does_not_fit_takes_the_layer_with_it() -> None:
    codes, sf = (x.repeat(3, 1, 1) for x in matrix())
    fits = packing.pack_w2(codes, sf)
    sf[1, 3, 0] = 60
    does_not = packing.pack_w2(codes, sf)
    assert fits.fp8 is not None
    assert fits.fp8.base.shape == fits.fp8.factor.shape == (3, 128)
    assert does_not.fp8 is None
    for w13, w2, plan in ((fits, fits, PLAN), (fits, does_not, PLAN.bf16), (does_not, fits, PLAN.bf16)):
        assert BoundLayer(w13, w2).gemms(PLAN) == plan
    assert BoundLayer(None, None).gemms(PLAN) == PLAN


def grouped_values(codes: torch.Tensor, sf: torch.Tensor) -> torch.Tensor:
    grouped, scales = fp8.group_rows(codes, sf)
    return (grouped.float().view(*scales.shape, 128) * scales.unsqueeze(-1)).view(codes.shape)


def test_grouped_rows_keep_all_but_tiny_codes() -> None:
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(64, 512, generator=generator) * torch.exp2(
        torch.randint(-12, 12, (64, 16), generator=generator).float()
    ).repeat_interleave(32, 1)
    codes, sf = mx.quantize_mxfp8(rows)
    want = mx.dequantize_mxfp8(codes, sf)
    got = grouped_values(codes, sf)
    largest = want.view(64, 4, 128).abs().amax(-1, keepdim=True)
    assert ((got - want).view(64, 4, 128).abs() <= largest * 2.0**-17).all()
    assert relative_l2(got, want) < 5e-5
    normal = (fp8.group_rows(codes, sf)[0].float().abs() > 2.0**-6).view(64, 512)
    assert torch.equal(got[normal], want[normal])


def test_scales_that_count_are_those_of_codes() -> None:
    """A block of zeros may have any scale; one of tiny codes is raised, but by no more than fp16 can."""
    codes = torch.zeros((1, 128), dtype=torch.uint8)
    sf = torch.tensor([[254, 100, 90, 0]], dtype=torch.uint8)
    codes[0, 32:64] = 1  # 2^-9
    codes[0, 64:96] = 0x7E  # 448
    want = mx.dequantize_mxfp8(codes, sf)
    assert torch.equal(grouped_values(codes, sf), want)
    codes[0, 64:96] = 0
    grouped, scales = fp8.group_rows(codes, sf)
    assert torch.equal(grouped_values(codes, sf), mx.dequantize_mxfp8(codes, sf))
    assert float(scales[0, 0]) == 2.0 ** (100 - fp8.MAX_RISE - 127)
    assert float(grouped[0, 40].float()) == 2.0 ** (fp8.MAX_RISE - 9)


@pytest.mark.parametrize(("code", "scale"), [(0x7F, 120), (0, mx.SCALE_NAN)])
def test_a_nan_makes_its_group_nan(code: int, scale: int) -> None:
    codes = torch.full((2, 256), 0x38, dtype=torch.uint8)
    sf = torch.full((2, 8), 127, dtype=torch.uint8)
    codes[1, 130:140], sf[1, 4] = code, scale
    grouped, scales = fp8.group_rows(codes, sf)
    assert scales.isnan().nonzero().tolist() == [[1, 1]]
    assert not grouped[1, 128:].float().any()


def test_orders_are_those_of_a_words_bytes() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128)
    ordered = fp8.to_fp8_order(codes)
    assert torch.equal(fp8.from_fp8_order(ordered), codes)
    # Step 1 (words 2 and 3), second half, t = 2: k = 32 t + 4 * 3, in the order 0, 2, 1, 3.
    assert ordered[0, 32 + 16 + 8 :][:4].tolist() == [76, 78, 77, 79]
    scales = torch.arange(96.0).view(32, 3)
    assert torch.equal(fp8.from_scale_order(fp8.to_scale_order(scales)), scales)
    # A thread t of a quad holds columns 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t of 16.
    assert fp8.to_scale_order(scales)[1, 16 + 4 : 16 + 8].tolist() == [
        3 * row + 1 for row in (18, 19, 26, 27)
    ]


def test_operands_share_the_images_without_meeting() -> None:
    image = torch.zeros((48, 1024), dtype=torch.bfloat16)
    middle = torch.zeros((48, 1536), dtype=torch.bfloat16)
    operands = vars(Fp8Operands.within(image, middle))
    for number, tensor in enumerate(operands.values(), start=1):
        assert tensor.data_ptr() % 16 == image.data_ptr() % 16
        tensor.view(torch.uint8).fill_(number)
    for number, tensor in enumerate(operands.values(), start=1):
        assert (tensor.view(torch.uint8) == number).all()


@pytest.mark.parametrize("path", [Path.FIXED_SLOT, Path.COMPACT])
def test_layer_is_the_quantized_oracle(path: Path) -> None:
    """A rank whose weights do not fit multiplies as bf16 beside others that use FP8."""
    weights = random_layer_weights(SHAPE, seed=5)
    layers = [BoundLayer.packed(shard(weights, SHAPE, rank), torch.device("cpu")) for rank in range(8)]
    assert {layer.gemms(PLAN).is_fp8 for layer in layers} == {True}
    assert layers[2].w2 is not None
    layers[2] = replace(layers[2], w2=replace(layers[2].w2, fp8=None))
    deployment = Deployment(shape=SHAPE, backend="hopper", max_tokens_per_rank=16, fixed_slot_max=16)
    group = Lockstep(plan_bundle(deployment), torch.device("cpu"))
    rows = batches("uniform", exact=False)
    got = group.forward(rows, layers, path, epoch=7, gemms=PLAN)
    want = [quantized_moe(batch, weights, SHAPE) for batch in rows]
    num_rows = sum(batch.num_rows for batch in rows)
    assert relative_l2(torch.cat(got), torch.cat(want)) <= tolerance(QUANTIZED_REL_L2, num_rows)


def test_when_fp8_serves() -> None:
    rows = int(FP8_MIN_MEAN_ROWS * V4_PRO.num_experts / V4_PRO.num_topk / V4_PRO.num_ranks)
    assert not plan_gemms(V4_PRO, rows).is_fp8
    assert plan_gemms(V4_PRO, rows + 1).is_fp8
    assert not plan_gemms(V4_PRO, 8192, batch_invariant=True).is_fp8
    assert not plan_gemms(V4_PRO, 8192, fp8_rows=True).is_fp8
    assert plan_gemms(V4_PRO, 8192).bf16 == replace(plan_gemms(V4_PRO, 8192), is_fp8=False)


def test_fp8_serves_no_step_that_large_m_takes() -> None:
    """Whose bits are the tiled kernel's."""
    base = Deployment(shape=V4_PRO, backend="hopper", max_tokens_per_rank=8192, large_m_min_tokens=4096)
    for enabled in (False, True):
        bundle = plan_bundle(replace(base, large_m_enabled=enabled))
        assert gemm_plan(bundle, Path.COMPACT, 2048).is_fp8
        assert gemm_plan(bundle, Path.COMPACT, 8192).is_fp8 is not enabled
        assert {plan.is_fp8 for plan in gemm_plans(bundle, Path.COMPACT)} == {True, False}
        assert not any(plan.is_fp8 for plan in gemm_plans(bundle, Path.LARGE_M))


def test_the_selftest_has_steps_for_both_kernels() -> None:
    """Of layers that fit and of one in which a rank's experts do not."""
    bundle = plan_bundle(cases.deployment_of(cases.FEW_EXPERTS, RowFormat.BF16))
    assert {plan.is_fp8 for plan in gemm_plans(bundle, Path.COMPACT)} == {True, False}
    first, second = cases.weights_of(cases.FEW_EXPERTS)
    for weights, fitting in ((first, [True] * 8), (second, [False] + [True] * 7)):
        parts = [shard(weights, cases.FEW_EXPERTS, rank) for rank in range(8)]
        assert [BoundLayer.packed(part, torch.device("cpu")).gemms(PLAN).is_fp8 for part in parts] == fitting
