"""Damaged machine code never crashes the process: a process of its own runs it."""

# ruff: noqa: E501  (tables of cases read best with one case a line)

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from megamoe.backends.gfx950.emulator.errors import CodeObjectError
from megamoe.backends.gfx950.emulator.lowering import lower

from .assembly import kernel_of
from .test_flydsl import mutant


def test_damaged_kernels_end_in_errors_or_run_on() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.gfx950.fuzz", "1", "160"],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    ends = ast.literal_eval(done.stdout.splitlines()[-1])
    assert sum(ends.values()) == 160
    assert min(ends[name] for name in ("ran on", "DecodeError", "MemoryFaultError")) > 5


@pytest.mark.parametrize(
    ("text", "at", "word", "match"),
    [
        ("v_readfirstlane_b32 s8, v1", 0, 0x7E000501 | 233 << 17, "scalar registers of v_readfirstlane_b32 must be below 128, got 233"),
        ("v_readlane_b32 s8, v1, s2", 1, 0x00000408, "source 0 of v_readlane_b32 must be a vector register, got SGPR"),
        ("v_add_u32_e32 v1, v2, v3", 0, 0x68000702 | 250 << 17 | 256, "register rows of v_add_u32 must be below"),
    ],
)  # fmt: skip
def test_registers_that_do_not_exist_are_refused(text: str, at: int, word: int, match: str) -> None:
    kernel = kernel_of(text)
    code = bytearray(kernel.code)
    code[4 * at : 4 * at + 4] = word.to_bytes(4, "little")
    broken = mutant(kernel, [])
    object.__setattr__(broken, "code", bytes(code))
    with pytest.raises(CodeObjectError, match=match):
        lower(broken)
