"""Scalar opcodes against Python integers: results and SCC, on corner values and random ones."""

# ruff: noqa: E501  (tables of cases read best with one case a line)

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from megamoe.backends.gfx950.emulator.device import DeviceConfig, DeviceGroup
from megamoe.backends.gfx950.emulator.errors import EmulatorError

from .assembly import kernel_of, run_op

rng = np.random.default_rng(5)
M32, M64 = 2**32 - 1, 2**64 - 1
CORNERS = [0, 1, 0x7FFFFFFF, 0x80000000, M32, 0x00050003]
NUMBERS = [*CORNERS, *(int(x) for x in rng.integers(0, 2**32, 4, dtype=np.uint64))]
LONGS = [
    0,
    1,
    2**63,
    M64,
    0xF000_0000_0000_0FF0,
    *(int(x) for x in rng.integers(0, 2**63, 3, dtype=np.uint64)),
]
PAIRS = [
    (a, b) for a in NUMBERS for b in (NUMBERS[(NUMBERS.index(a) * 3 + k) % len(NUMBERS)] for k in range(4))
]
LONG_PAIRS = [(a, LONGS[(k * 3 + 1) % len(LONGS)]) for k, a in enumerate(LONGS)] + [(a, a) for a in LONGS]


@pytest.fixture(scope="module")
def group() -> Iterator[DeviceGroup]:
    with DeviceGroup(DeviceConfig(detect_waits=True)) as one:
        yield one


def s(x: int, bits: int = 32) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def nonzero(r: int, _a: int, _b: int) -> int:
    return int(r != 0)


def keep(_r: int, _a: int, _b: int) -> int:
    return 1  # SCC is set before each case


def field(x: int, spec: int, bits: int, signed: bool) -> int:
    at, count = spec & (bits - 1), min(spec >> 16 & 127, bits)
    value = ((s(x, bits) if signed else x) >> at) & ((1 << count) - 1) if count else 0
    return s(value, count) if signed and count else value


Two = dict[str, tuple[Callable[[int, int], int], Callable[[int, int, int], int]]]
TWO: Two = {
    "s_absdiff_i32": (lambda a, b: abs(s(a) - s(b)), lambda r, a, b: int((abs(s(a) - s(b)) & M32) != 0)),
    "s_sub_u32": (lambda a, b: a - b, lambda r, a, b: int(a < b)), "s_add_i32": (lambda a, b: a + b, lambda r, a, b: int(s(a) + s(b) != s(a + b))),
    "s_sub_i32": (lambda a, b: a - b, lambda r, a, b: int(s(a) - s(b) != s(a - b))), "s_addc_u32": (lambda a, b: a + b + 1, lambda r, a, b: int(a + b + 1 > M32)),
    "s_subb_u32": (lambda a, b: a - b - 1, lambda r, a, b: int(a < b + 1)), "s_min_i32": (lambda a, b: min(s(a), s(b)), lambda r, a, b: int(s(a) < s(b))),
    "s_max_u32": (max, lambda r, a, b: int(a > b)), "s_min_u32": (min, lambda r, a, b: int(a < b)), "s_max_i32": (lambda a, b: max(s(a), s(b)), lambda r, a, b: int(s(a) > s(b))),
    "s_andn2_b32": (lambda a, b: a & ~b, nonzero), "s_orn2_b32": (lambda a, b: a | ~b, nonzero), "s_nand_b32": (lambda a, b: ~(a & b), nonzero), "s_nor_b32": (lambda a, b: ~(a | b), nonzero),
    "s_xnor_b32": (lambda a, b: ~(a ^ b), nonzero), "s_lshl_b32": (lambda a, b: a << (b & 31), nonzero), "s_ashr_i32": (lambda a, b: s(a) >> (b & 31), nonzero),
    "s_bfe_u32": (lambda a, b: field(a, b & ~0xFFE0, 32, False), nonzero), "s_bfe_i32": (lambda a, b: field(a, b & ~0xFFE0, 32, True), nonzero),
    "s_bfm_b32": (lambda a, b: ((1 << (a & 31)) - 1) << (b & 31), keep), "s_mul_i32": (lambda a, b: a * b, keep), "s_mul_hi_i32": (lambda a, b: s(a) * s(b) >> 32, keep),
    "s_pack_ll_b32_b16": (lambda a, b: a & 0xFFFF | b << 16, keep), "s_pack_hh_b32_b16": (lambda a, b: a >> 16 | b & 0xFFFF0000, keep),
    "s_lshl1_add_u32": (lambda a, b: (a << 1) + b, lambda r, a, b: int((a << 1) + b > M32)), "s_lshl4_add_u32": (lambda a, b: (a << 4) + b, lambda r, a, b: int((a << 4) + b > M32)),
}  # fmt: skip
TWO_LONG: Two = {
    "s_andn2_b64": (lambda a, b: a & ~b, nonzero), "s_orn2_b64": (lambda a, b: a | ~b, nonzero), "s_nand_b64": (lambda a, b: ~(a & b), nonzero), "s_nor_b64": (lambda a, b: ~(a | b), nonzero),
    "s_xnor_b64": (lambda a, b: ~(a ^ b), nonzero),
}  # fmt: skip
SHIFTS: Two = {  # the second operand has 32 bits
    "s_lshl_b64": (lambda a, b: a << (b & 63), nonzero), "s_lshr_b64": (lambda a, b: a >> (b & 63), nonzero), "s_bfe_u64": (lambda a, b: field(a, b & ~0xFFC0, 64, False), nonzero),
    "s_bfe_i64": (lambda a, b: field(a, b & ~0xFFC0, 64, True), nonzero),
}  # fmt: skip


def leading(x: int, bits: int) -> int:
    return bits - x.bit_length() if x else -1


def quads(x: int) -> int:
    return sum(1 << k for k in range(16) if x >> 4 * k & 15)


def whole(x: int) -> int:
    return sum(15 << 4 * k for k in range(16) if x >> 4 * k & 15)


def reverse(x: int, bits: int) -> int:
    return int(f"{x:0{bits}b}"[::-1], 2)


def sign_run(x: int, bits: int) -> int:
    return leading((~x if x >> (bits - 1) else x) & ((1 << bits) - 1), bits)


# dwords read and written
One = dict[str, tuple[int, int, Callable[[int], int], Callable[[int, int, int], int]]]
ONE: One = {
    "s_not_b32": (1, 1, lambda a: ~a, nonzero), "s_not_b64": (2, 2, lambda a: ~a, nonzero), "s_wqm_b32": (1, 1, whole, nonzero), "s_wqm_b64": (2, 2, whole, nonzero),
    "s_quadmask_b32": (1, 1, quads, nonzero), "s_quadmask_b64": (2, 2, quads, nonzero), "s_brev_b64": (2, 2, lambda a: reverse(a, 64), keep),
    "s_bcnt0_i32_b32": (1, 1, lambda a: 32 - a.bit_count(), nonzero), "s_bcnt0_i32_b64": (2, 1, lambda a: 64 - a.bit_count(), nonzero), "s_bcnt1_i32_b32": (1, 1, int.bit_count, nonzero),
    "s_ff0_i32_b32": (1, 1, lambda a: (~a & -~a).bit_length() - 1 if a != M32 else -1, keep), "s_ff0_i32_b64": (2, 1, lambda a: (~a & -~a).bit_length() - 1 if a != M64 else -1, keep),
    "s_ff1_i32_b64": (2, 1, lambda a: (a & -a).bit_length() - 1, keep), "s_flbit_i32_b64": (2, 1, lambda a: leading(a, 64), keep), "s_flbit_i32": (1, 1, lambda a: sign_run(a, 32), keep),
    "s_flbit_i32_i64": (2, 1, lambda a: sign_run(a, 64), keep), "s_sext_i32_i8": (1, 1, lambda a: s(a, 8), keep), "s_sext_i32_i16": (1, 1, lambda a: s(a, 16), keep),
    "s_bitreplicate_b64_b32": (1, 2, lambda a: sum(3 << 2 * k for k in range(32) if a >> k & 1), keep), "s_cmov_b32": (1, 1, lambda a: a, keep), "s_cmov_b64": (2, 2, lambda a: a, keep),
    "s_bitset0_b32": (1, 1, lambda a: 0x5A5A5A5A & ~(1 << (a & 31)), keep), "s_bitset0_b64": (1, 2, lambda a: 0x5A5A5A5A5A5A5A5A & ~(1 << (a & 63)), keep),
    "s_bitset1_b64": (1, 2, lambda a: 0x5A5A5A5A5A5A5A5A | 1 << (a & 63), keep), "s_abs_i32": (1, 1, lambda a: abs(s(a)), nonzero),
}  # fmt: skip


def run(group: DeviceGroup, cases: list[tuple[str, int]]) -> list[tuple[int, int]]:
    """(result in s[16:17], SCC) of each body; `width` dwords of the result count."""
    out = []
    for at in range(0, len(cases), 24):
        chunk, lines = cases[at : at + 24], []
        for k, (text, _) in enumerate(chunk):
            lines += [
                "s_mov_b32 s16, 0x5a5a5a5a",
                "s_mov_b32 s17, 0x5a5a5a5a",
                "s_cmp_eq_u32 0, 0",
                text,
                "s_cselect_b32 s20, 1, 0",
            ]
            lines += [
                f"v_mov_b32_e32 v{40 + 3 * k}, s16",
                f"v_mov_b32_e32 v{41 + 3 * k}, s17",
                f"v_mov_b32_e32 v{42 + 3 * k}, s20",
            ]
        rows = run_op(group, "\n".join(lines), [], 3 * len(chunk))[:, 0].tolist()
        for k, (_, width) in enumerate(chunk):
            out.append((rows[3 * k] | (rows[3 * k + 1] << 32 if width == 2 else 0), rows[3 * k + 2]))
    return out


def put(register: int, value: int, dwords: int = 1) -> str:
    return "\n".join(f"s_mov_b32 s{register + k}, {value >> 32 * k & M32:#x}" for k in range(dwords))


@pytest.mark.parametrize("name", [*TWO, *TWO_LONG, *SHIFTS])
def test_two_operands(group: DeviceGroup, name: str) -> None:
    table = TWO if name in TWO else TWO_LONG if name in TWO_LONG else SHIFTS
    value, carry = table[name]
    wide = name not in TWO
    operands = (
        "s[16:17], s[8:9], s10"
        if name in SHIFTS
        else "s[16:17], s[8:9], s[10:11]"
        if wide
        else "s16, s8, s10"
    )
    pairs = [(a, b & M32) for a, b in LONG_PAIRS] if name in SHIFTS else LONG_PAIRS if wide else PAIRS
    cases = [(f"{put(8, a, 2)}\n{put(10, b, 2)}\n{name} {operands}", 2 if wide else 1) for a, b in pairs]
    mask = M64 if wide else M32
    for (a, b), (result, scc) in zip(pairs, run(group, cases), strict=True):
        want = value(a, b) & mask
        assert (result, scc) == (want, carry(want, a, b)), (hex(a), hex(b))


@pytest.mark.parametrize("name", ONE)
def test_one_operand(group: DeviceGroup, name: str) -> None:
    read, written, value, carry = ONE[name]
    operands = f"{'s[16:17]' if written == 2 else 's16'}, {'s[8:9]' if read == 2 else 's8'}"
    numbers = LONGS if read == 2 else NUMBERS
    cases = [(f"{put(8, a, 2)}\n{name} {operands}", written) for a in numbers]
    for a, (result, scc) in zip(numbers, run(group, cases), strict=True):
        want = value(a) & (M64 if written == 2 else M32)
        assert (result, scc) == (want, carry(want, a, 0)), hex(a)


@pytest.mark.parametrize(
    "name", ["and", "or", "xor", "andn2", "orn2", "nand", "nor", "xnor", "andn1", "orn1"]
)
def test_saving_exec(group: DeviceGroup, name: str) -> None:
    step = {
        "and": lambda x, e: x & e, "or": lambda x, e: x | e, "xor": lambda x, e: x ^ e, "andn2": lambda x, e: x & ~e, "orn2": lambda x, e: x | ~e, "nand": lambda x, e: ~(x & e),
        "nor": lambda x, e: ~(x | e), "xnor": lambda x, e: ~(x ^ e), "andn1": lambda x, e: ~x & e, "orn1": lambda x, e: ~x | e,
    }[name]  # fmt: skip
    kinds = ["saveexec", *(["wrexec"] if name in ("andn1", "andn2") else [])]
    for kind in kinds:
        cases = []
        for x, e in LONG_PAIRS:
            text = f"{put(8, x, 2)}\n{put(10, e, 2)}\ns_mov_b64 exec, s[10:11]\ns_{name}_{kind}_b64 s[12:13], s[8:9]\ns_mov_b64 s[16:17], exec\n"
            cases += [
                (text + "s_mov_b64 exec, -1", 2),
                (text + "s_mov_b64 exec, -1\ns_mov_b64 s[16:17], s[12:13]", 2),
            ]
        got = run(group, cases)
        for k, (x, e) in enumerate(LONG_PAIRS):
            new = step(x, e) & M64
            assert got[2 * k] == (new, int(new != 0))
            assert got[2 * k + 1][0] == (e if kind == "saveexec" else new)


def test_comparisons(group: DeviceGroup) -> None:
    orders: dict[str, Callable[[int, int], bool]] = {
        "eq": int.__eq__,
        "lg": int.__ne__,
        "gt": int.__gt__,
        "ge": int.__ge__,
        "lt": int.__lt__,
        "le": int.__le__,
    }
    cases, want = [], []
    for order, step in orders.items():
        for a, b in PAIRS[::3]:
            for kind in ("i32", "u32"):
                x, y = (s(a), s(b)) if kind == "i32" else (a, b)
                cases.append((f"{put(8, a)}\n{put(10, b)}\ns_cmp_{order}_{kind} s8, s10", 1))
                want.append(int(step(x, y)))
                small = b & 0xFFFF
                cases.append((f"{put(8, a)}\ns_cmpk_{order}_{kind} s8, {small:#x}", 1))
                want.append(int(step(x, s(small, 16) if kind == "i32" else small)))
    for a, b in LONG_PAIRS:
        for order in ("eq", "lg"):
            cases.append((f"{put(8, a, 2)}\n{put(10, b, 2)}\ns_cmp_{order}_u64 s[8:9], s[10:11]", 1))
            want.append(int(orders[order](a, b)))
        for bit in (0, 1):
            cases.append((f"{put(8, a, 2)}\n{put(10, b & M32)}\ns_bitcmp{bit}_b64 s[8:9], s10", 1))
            want.append(int((a >> (b & 63) & 1) == bit))
            cases.append((f"{put(8, a & M32)}\n{put(10, b & M32)}\ns_bitcmp{bit}_b32 s8, s10", 1))
            want.append(int(((a & M32) >> (b & 31) & 1) == bit))
    got = [scc for _, scc in run(group, cases)]
    assert [text for (text, _), a, b in zip(cases, got, want, strict=True) if a != b] == []


def test_immediates_and_jumps(group: DeviceGroup) -> None:
    cases: dict[str, int] = {
        "s_cmovk_i32 s16, -2": M32 - 1,
        "s_cmp_eq_u32 0, 1\ns_cmovk_i32 s16, -2": 0x5A5A5A5A,
        "s_mulk_i32 s16, 3": 0x5A5A5A5A * 3 & M32,
        "s_getpc_b64 s[8:9]\ns_add_u32 s8, s8, 16\ns_setpc_b64 s[8:9]\ns_mov_b32 s16, 1\ns_nop 0": 0x5A5A5A5A,
        "s_getpc_b64 s[8:9]\ns_add_u32 s8, s8, 12\ns_swappc_b64 s[10:11], s[8:9]\ns_nop 0\ns_sub_u32 s16, s8, s10": 4,
        "s_call_b64 s[8:9], over\ns_mov_b32 s16, 5\ns_branch done\nover:\ns_setpc_b64 s[8:9]\ndone:": 5,
        "s_bfm_b64 s[16:17], 4, 2": 0x3C,
        "s_dcache_inv\ns_dcache_wb\ns_icache_inv\ns_wakeup\ns_nop 3\ns_setprio 1": 0x5A5A5A5A,
        "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 4), 5\ns_getreg_b32 s16, hwreg(HW_REG_MODE, 4, 4)\ns_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 4), 15": 5,
        "s_movk_i32 s8, 9\ns_setreg_b32 hwreg(HW_REG_MODE, 4, 4), s8\ns_getreg_b32 s16, hwreg(HW_REG_MODE, 4, 4)\ns_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 4), 15": 9,
        "s_memtime s[8:9]\ns_nop 0\ns_memrealtime s[10:11]\ns_waitcnt lgkmcnt(0)\ns_sub_u32 s16, s10, s8": 2,
        "s_mov_b32 m0, 2\ns_mov_b32 s10, 7\ns_mov_b32 s11, 8\ns_movrels_b64 s[16:17], s[8:9]": 7,
        "s_mov_b32 m0, 8\ns_mov_b32 s10, 7\ns_mov_b32 s11, 8\ns_movreld_b64 s[8:9], s[10:11]": 7,
    }  # fmt: skip
    for text, want in cases.items():
        ((result, _),) = run(group, [(text, 1)])
        assert result == want, text


def test_scalar_loads_of_every_width(group: DeviceGroup) -> None:
    """Plain and through a descriptor, which gives zero past its records."""
    row = rng.integers(0, 2**32, 64, dtype=np.uint32)
    lines, want = ["s_mov_b32 s8, s4", "s_mov_b32 s9, s5", "s_movk_i32 s10, 80", "s_mov_b32 s11, 0x27000"], []
    for k, count in enumerate((1, 2, 4, 8, 16)):
        name, target = (
            f"dword{f'x{count}' if count > 1 else ''}",
            "s32" if count == 1 else f"s[32:{31 + count}]",
        )
        lines += [
            f"s_load_{name} {target}, s[4:5], 0x10",
            "s_waitcnt lgkmcnt(0)",
            f"v_mov_b32_e32 v{40 + 2 * k}, s{31 + count}",
        ]
        lines += [
            f"s_buffer_load_{name} {target}, s[8:11], 0x20",
            "s_waitcnt lgkmcnt(0)",
            f"v_mov_b32_e32 v{41 + 2 * k}, s{31 + count}",
        ]
        last = 8 + count - 1
        want += [row[4 + count - 1], row[last] if last < 20 else 0]
    got = run_op(group, "\n".join(lines), [row], 10)
    np.testing.assert_array_equal(got[:, 0], want)


@pytest.mark.parametrize(
    ("body", "match"),
    [
        ("s_trap 2", "s_trap 2"), ("s_sendmsg sendmsg(MSG_INTERRUPT)", "s_sendmsg 1"), ("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 4), 1", "rounding mode 0x1"),
        ("s_getreg_b32 s8, hwreg(40)", "hardware register"), ("s_mov_b64 s[8:9], 0x1234\ns_setpc_b64 s[8:9]", "which is no instruction of the kernel"),
        ("s_movk_i32 m0, 0x70\ns_movrels_b32 s8, s9", "indexed scalar register"),
    ],
)  # fmt: skip
def test_what_stops_a_wave_is_named(body: str, match: str) -> None:
    with DeviceGroup(DeviceConfig()) as group:
        group.devices[0].default_stream.launch(kernel_of(body, name="stops"), (1,), (64,), [0, 0])
        with pytest.raises(EmulatorError, match=match) as caught:
            group.synchronize()
        assert "stops, workgroup 0, wave 0" in str(caught.value)
