"""The decoder against LLVM: what it writes as text, LLVM's assembler turns back into the same bytes."""

# ruff: noqa: E501  (tables of cases read best with one case a line)

from __future__ import annotations

import pytest

from megamoe.backends.gfx950.emulator.errors import DecodeError
from megamoe.backends.gfx950.emulator.isa import matrix, memory, scalar, vector
from megamoe.backends.gfx950.emulator.isa.decode import decode, decode_one
from megamoe.backends.gfx950.emulator.isa.text import disassemble

from . import triton_kernels as tk
from .toolchain import assemble, triton_kernel

# Opcodes whose text LLVM only takes in another form, or not on gfx950 in this encoding.
_NUMBERS_AS_TEXT = ("dpp_ctrl", "dst_sel")


def _back(code: bytes) -> tuple[str, bytes]:
    one = decode_one(code, 0)
    text = disassemble(one)
    return text, assemble(text)


def _words(*words: int) -> bytes:
    return b"".join(w.to_bytes(4, "little") for w in words)


def _scalar_words() -> list[bytes]:
    out = [_words(2 << 30 | op << 23 | 20 << 16 | 40 << 8 | 30) for op in scalar.SOP2]
    out += [
        _words(0x17D << 23 | (20 if r.widths[0] else 0) << 16 | op << 8 | (30 if r.widths[1] else 0))
        for op, r in scalar.SOP1.items()
    ]
    out += [
        _words(0x17E << 23 | op << 16 | (9 if "gpr_idx" in row.mnemonic else 40) << 8 | 30)
        for op, row in scalar.SOPC.items()
    ]
    out += [
        _words(0x30 << 26 | op << 18 | 1 << 17 | 20 << 6 | 4, 0x1234)
        for op, r in scalar.SMEM.items()
        if r.widths[0] and "time" not in r.mnemonic
    ]
    return out


def _vector_words() -> list[bytes]:
    out = [
        _words(0x3F << 25 | 20 << 17 | op << 9 | 256 + 30)
        for op, r in vector.VOP1.items()
        if r.widths[0] and r.mnemonic != "v_accvgpr_mov_b32"
    ]
    out += [
        _words(op << 25 | 20 << 17 | 40 << 9 | 256 + 30)
        for op, r in vector.VOP2.items()
        if "mk_" not in r.mnemonic and "ak_" not in r.mnemonic
    ]
    out += [_words(0x3E << 25 | op << 17 | 40 << 9 | 256 + 30) for op in vector.VOPC]
    for op, r in vector.VOP3.items():
        step = 32 if max(r.widths) > 8 else 10
        at = [
            256 + 20 + step * (k + 1) if not (k + 1 < len(r.scalar) and r.scalar[k + 1]) else 20 + 10 * k
            for k in range(3)
        ]
        given = sum(1 for w in r.widths[1:] if w) - (
            1 if len(r.widths) > 1 and r.scalar[1] and r.mnemonic != "v_writelane_b32" else 0
        )
        if len(r.widths) > 1 and r.scalar[1] and r.mnemonic != "v_writelane_b32":
            at = [256 + 20 + 10 * (k + 1) for k in range(3)]
        srcs = sum((at[k] if k < given else 0) << 9 * k for k in range(3))
        sdst = 10 << 8 if len(r.widths) > 1 and r.scalar[1] and r.mnemonic != "v_writelane_b32" else 0
        out.append(_words(0x34 << 26 | op << 16 | sdst | 20, srcs))
    return out


def _matrix_words() -> list[bytes]:
    out = []
    for op, r in matrix.VOP3P.items():
        if "mfma" in r.mnemonic:
            out.append(
                _words(0x1A7 << 23 | op << 16 | 1 << 15 | 4, 256 + 64 | (256 + 96) << 9 | (256 + 128) << 18)
            )
        elif "mix" not in r.mnemonic:
            count = len(r.widths) - 1
            srcs = sum((256 + 30 + 10 * k) << 9 * k for k in range(count))
            out.append(_words(0x1A7 << 23 | op << 16 | 1 << 14 | 20, srcs | 3 << 27))
    return out


def _memory_words() -> list[bytes]:
    out = []
    for op, r in memory.DS.items():
        d, a, x, y = r.widths
        out.append(
            _words(
                0x36 << 26 | op << 17 | 8,
                (30 if a else 0) | (40 if x else 0) << 8 | (50 if y else 0) << 16 | (20 if d else 0) << 24,
            )
        )
    for op, r in memory.FLAT.items():
        width, data = r.widths
        atomic = 1 << 16 if "atomic" in r.mnemonic else 0
        for segment, saddr in ((2, 0x7F), (2, 6), (0, 0)):
            if (segment == 0 and "lds" in r.mnemonic) or (
                segment == 0 and "f64" in r.mnemonic and "add" not in r.mnemonic
            ):
                continue
            out.append(
                _words(
                    0x37 << 26 | op << 18 | segment << 14 | atomic | 16,
                    30 | (40 if data else 0) << 8 | saddr << 16 | (20 if width else 0) << 24,
                )
            )
    for op, r in memory.MUBUF.items():
        if r.widths != (0, 0):
            out.append(
                _words(
                    0x38 << 26
                    | op << 18
                    | 1 << 12
                    | 1 << 14 * (1 if "atomic" in r.mnemonic else 0) & ~1
                    | 16,
                    30 | 20 << 8 | 1 << 16 | 0x80 << 24,
                )
            )
    # Offset by a register, 32 bits as float, both cache bits.
    typed = 0x3A << 26 | 7 << 23 | 4 << 19 | 1 << 14 | 1 << 12 | 16
    out += [_words(typed | op << 15, 30 | 20 << 8 | 1 << 16 | 1 << 21 | 0x80 << 24) for op in memory.MTBUF]
    return out


@pytest.mark.parametrize(
    ("words", "most_refused"), [(_scalar_words, 4), (_vector_words, 6), (_matrix_words, 2), (_memory_words, 8)]
)  # fmt: skip
def test_every_opcode_goes_back_to_its_bytes(words: object, most_refused: int) -> None:
    assert callable(words)
    wrong, refused = [], []
    for code in words():
        try:
            text, back = _back(code)
        except ValueError as error:
            refused.append(str(error).splitlines()[0])
            continue
        if back[: len(code)] != code:
            wrong.append(f"{text}: {code.hex()} became {back.hex()}")
    assert not wrong, "\n".join(wrong)
    assert len(refused) <= most_refused, "\n".join(refused)


@pytest.mark.parametrize(
    "text",
    [
        "v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:9], v[12:15], v[20:23], v24, v25 op_sel:[1,0] op_sel_hi:[0,1] cbsz:2 blgp:4",
        "v_mfma_f32_16x16x4_f32 a[0:3], a4, a5, a[8:11]",
        "buffer_load_dwordx4 v20, s[4:7], 0 offen offset:16 sc0 nt sc1 lds",
        "global_load_dword a1, v[2:3], off sc1",
        "scratch_load_dword v1, off, s3 offset:4",
        "s_waitcnt vmcnt(63) lgkmcnt(0)",
        "v_add_f32_e64 v1, -|v2|, s3 mul:2",
        "v_fma_f64 v[0:1], v[2:3], 0.5, v[4:5]",
        "v_pk_fma_f16 v1, v2, v3, v4 op_sel:[1,0,0] op_sel_hi:[0,1,1] neg_lo:[0,1,0]",
        "v_bitop3_b32 v1, v2, v3, v4 bitop3:0xca",
        "s_load_dwordx4 s[4:7], s[2:3], s9 offset:0x10",
        "v_addc_co_u32_e32 v1, vcc, 7, v3, vcc",
        "v_add_u32_e32 v1, 0x12345678, v3",
        "ds_read2st64_b64 v[0:3], v4 offset0:3 offset1:5",
    ],
)
def test_modifiers_go_back_to_their_bytes(text: str) -> None:
    code = assemble(text)
    written, back = _back(code)
    assert back == code, written


@pytest.mark.parametrize("function", ["softmax", "matmul"])
def test_whole_kernels_go_back_to_their_bytes(function: str) -> None:
    if function == "softmax":
        kernel, _, _ = triton_kernel(tk.softmax, {"x": "*fp32", "out": "*fp32", "n": "i32"}, {"BLOCK": 512})
    else:
        types = {"a": "*bf16", "b": "*bf16", "c": "*fp32", "N": "i32", "K": "i32"}
        kernel, _, _ = triton_kernel(tk.matmul, types, {"BM": 64, "BN": 64, "BK": 64})
    checked = 0
    for one in kernel.instructions:
        text = disassemble(one)
        if one.is_branch or any(word in text for word in _NUMBERS_AS_TEXT) or one.mnemonic == "s_nop":
            continue
        assert assemble(text) == kernel.code[one.offset : one.offset + one.size], text
        checked += 1
    assert checked > 100


def test_unknown_words_are_named() -> None:
    with pytest.raises(DecodeError, match=r"byte 0x4 must be .* gfx950"):
        decode(_words(0xBF800000, 0xFFFFFFFF))
    with pytest.raises(DecodeError, match="VOP1 opcode at byte 0x0"):
        decode(_words(0x3F << 25 | 0xFE << 9))
    with pytest.raises(DecodeError, match="must end inside the code"):
        decode(_words(0xD1FF0000))


def test_instructions_have_source_lines() -> None:
    kernel, _, _ = triton_kernel(tk.softmax, {"x": "*fp32", "out": "*fp32", "n": "i32"}, {"BLOCK": 512})
    lines = {
        kernel.line_of(one.offset)
        for one in kernel.instructions
        if one.mnemonic.startswith("buffer_store") or "global_store" in one.mnemonic
    }
    first = tk.softmax.__code__.co_firstlineno
    assert lines == {("triton_kernels.py", first + 4)}
