"""Every instruction that LLVM's assembler takes for gfx950 is decoded; those that are not executed are listed here."""

from __future__ import annotations

import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from megamoe.backends.gfx950.emulator.isa import matrix, memory, scalar, vector
from megamoe.backends.gfx950.emulator.native import implemented

# Decoded, so that an error can name them, and not executed: no compiler of compute kernels emits them.
NOT_EXECUTED = {
    "sparse matrix instructions": "v_smfmac_*",
    "scalar stores and atomics": "s_*store_dword* s_atomic_* s_buffer_atomic_*",
    "scalar scratch and cache control": "s_scratch_* s_dcache_discard* s_atc_probe*",
    "global wave sync": "ds_gws_*",
    "graphics": "v_cube* v_screen_partition_* v_cvt_pkaccum_u8_f32",
    "traps, debugging, forks": (
        "s_cbranch_cdbg* s_cbranch_?_fork s_cbranch_join s_rfe_* s_setkill s_setvskip s_sendmsghalt "
        "s_endpgm_ordered_ps_done"
    ),
    "conditional exchange of halves": "ds_condxchg32_rtn_b64",
}
# Other spellings of an instruction, and the scale prefix, which is decoded with the instruction behind it.
ALIASES = r"v_mfma_(f32|f64|i32)_\d+x\d+x\d+(f16|bf16|f32|f64|i8)(_1k)?|v_mul_lo_i32|v_mfma_ld_scale_b32"


def _mnemonics() -> list[str]:
    """Names in the tables of Triton's LLVM: length byte, then the name."""
    import triton

    data = (Path(triton.__file__).parent / "_C" / "libtriton.so").read_bytes()
    found = set()
    for hit in re.finditer(rb"(?:v|s|ds|global|flat|scratch|buffer|tbuffer)_[a-z0-9_]{2,70}", data):
        length = data[hit.start() - 1]
        if 4 <= length <= len(hit.group()):
            found.add(hit.group()[:length].decode())
    return sorted(found)


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Mnemonics of gfx950: the assembler complains about missing operands, not about the name."""
    names, folder = _mnemonics(), tmp_path_factory.mktemp("mnemonics")
    (folder / "names.s").write_text("\n".join(names) + "\n")
    command = [sys.executable, "-m", "ziglang", "cc", "-target", "amdgcn-amdhsa-none", "-mcpu=gfx950", "-c"]
    done = subprocess.run(
        [*command, str(folder / "names.s"), "-o", str(folder / "names.o")],
        capture_output=True,
        text=True,
        check=False,
    )
    refused = {
        names[int(line) - 1]
        for line, why in re.findall(r"names\.s:(\d+):\d+: error: (.*)", done.stderr)
        if why.startswith(("invalid instruction", "instruction not supported"))
    }
    out = {re.sub(r"(_e32|_e64|_dpp|_sdwa)+$", "", name) for name in set(names) - refused}
    assert len(out) > 1000, done.stderr[-2000:]
    assert not out & {"v_wmma_f32_16x16x16_f16", "v_dual_add_f32", "s_wait_loadcnt"}
    return out


def decoded() -> set[str]:
    tables = [
        matrix.VOP3P, memory.DS, memory.MUBUF, memory.MTBUF, scalar.SOP1, scalar.SOP2, scalar.SOPC, scalar.SOPK,
        scalar.SOPP, scalar.SMEM, vector.VOP1, vector.VOP2, vector.VOP3, vector.VOPC,
    ]  # fmt: skip
    out = {row.mnemonic for table in tables for row in table.values()}
    out |= {
        f"{space}_{row.mnemonic}" for row in memory.FLAT.values() for space in ("flat", "global", "scratch")
    }
    scaled = {f"v_mfma_scale_f32_{shape}_f8f6f4" for shape in ("16x16x128", "32x32x64")}
    return out | scaled | {"v_accvgpr_read_b32", "v_accvgpr_write_b32"}


def test_every_instruction_is_decoded(taken: set[str]) -> None:
    missing = {name for name in taken - decoded() if not re.fullmatch(ALIASES, name)}
    assert not missing


def test_what_is_not_executed_is_listed(taken: set[str]) -> None:
    patterns = " ".join(NOT_EXECUTED.values()).split()
    left = taken & decoded() - implemented()
    assert {name for name in left if not any(fnmatch(name, p) for p in patterns)} == set()
    assert [p for p in patterns if not any(fnmatch(name, p) for name in left)] == []


def test_handlers_belong_to_decoded_instructions() -> None:
    assert implemented() <= decoded()
