"""Kernels that move rows, on the CPU: their results are the oracle's, their tables and images the references'."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path as FilePath

ROOT = FilePath(__file__).parents[2]


def test_kernels_that_move_rows_do_what_their_references_do() -> None:
    """In a process of its own: Triton asks for TRITON_INTERPRET when a kernel is defined.

    fixed_slot with bf16 rows and compact with FP8 rows, quantized batches and others, empty ranks and full ones.
    """
    command = [sys.executable, "-m", "tests.hopper.interpreted"]
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=env, check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == {"compared": 64, "wrong": []}
