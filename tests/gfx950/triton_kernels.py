"""Kernels that were not written for the emulator: plain Triton, compiled for gfx950 by Triton's own backend."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


def add(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)


def fused_half(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(x + i, mask=i < n), tl.load(y + i, mask=i < n)
    tl.store(out + i, a * b + a - b * 0.5, mask=i < n)


def silu(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + i, mask=i < n)
    tl.store(out + i, a * tl.sigmoid(a), mask=i < n)


def trigonometry(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + i, mask=i < n)
    tl.store(out + i, tl.sqrt(tl.abs(a)) + tl.log(tl.abs(a) + 1.0) + tl.floor(a), mask=i < n)


def integers(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(x + i, mask=i < n, other=1), tl.load(y + i, mask=i < n, other=1)
    tl.store(out + i, (a // b) ^ (a % b) + (a << 3) - (b >> 2) * a, mask=i < n)


def longs(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(x + i, mask=i < n, other=1), tl.load(y + i, mask=i < n, other=1)
    tl.store(out + i, tl.where(a > b, a * b, (a - b) >> 5) & 0x7FFFFFFFFFFF, mask=i < n)


def doubles(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(x + i, mask=i < n, other=1.0), tl.load(y + i, mask=i < n, other=1.0)
    tl.store(out + i, a * b + a / b, mask=i < n)


def bytes_mix(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(x + i, mask=i < n, other=0), tl.load(y + i, mask=i < n, other=0)
    tl.store(out + i, (a ^ b) + tl.maximum(a, b), mask=i < n)


def to_bfloat(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n).to(tl.bfloat16), mask=i < n)


def to_float8(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n).to(tl.float8e4nv), mask=i < n)


def random_numbers(out, seed, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.randint(seed, i), mask=i < n)


def row_sum(x, out, n, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    tl.store(out + row, tl.sum(tl.load(x + row * n + i, mask=i < n, other=0.0), axis=0))


def row_argmax(x, out, n, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    tl.store(out + row, tl.argmax(tl.load(x + row * n + i, mask=i < n, other=-1e30), axis=0))


def softmax(x, out, n, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    a = tl.load(x + row * n + i, mask=i < n, other=-float("inf"))
    e = tl.exp(a - tl.max(a, axis=0))
    tl.store(out + row * n + i, e / tl.sum(e, axis=0), mask=i < n)


def layer_norm(x, out, n, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    a = tl.load(x + row * n + i, mask=i < n, other=0.0)
    mean = tl.sum(a, axis=0) / n
    d = tl.where(i < n, a - mean, 0.0)
    tl.store(out + row * n + i, d * tl.rsqrt(tl.sum(d * d, axis=0) / n + 1e-5), mask=i < n)


def prefix_sum(x, out, n, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    tl.store(out + row * n + i, tl.cumsum(tl.load(x + row * n + i, mask=i < n, other=0), axis=0), mask=i < n)


def histogram(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out + tl.load(x + i, mask=i < n, other=0), 1, mask=i < n)


def float_atomics(x, total, largest, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + i, mask=i < n, other=0.0)
    tl.atomic_add(total, tl.sum(a, axis=0))
    tl.atomic_max(largest, tl.max(a, axis=0))


def transpose(x, out, m, n, BLOCK: tl.constexpr):
    r, c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + r[:, None] * n + c[None, :])
    tl.store(out + c[:, None] * m + r[None, :], tl.trans(a))


def matmul(a, b, c, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    r, s, k = (
        tl.program_id(0) * BM + tl.arange(0, BM),
        tl.program_id(1) * BN + tl.arange(0, BN),
        tl.arange(0, BK),
    )
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for at in range(0, K, BK):
        x = tl.load(a + r[:, None] * K + (at + k)[None, :])
        y = tl.load(b + (at + k)[:, None] * N + s[None, :])
        acc += tl.dot(x, y)
    tl.store(c + r[:, None] * N + s[None, :], acc)


def scaled_matmul(
    a,
    sa,
    b,
    sb,
    c,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    FB: tl.constexpr,
    PB: tl.constexpr,
):
    """A is E4M3 [M, K]; B is [N, K / PB] of format FB; E8M0 scales a row and 32 elements."""
    r, s, g = (
        tl.program_id(0) * BM + tl.arange(0, BM),
        tl.program_id(1) * BN + tl.arange(0, BN),
        tl.arange(0, BK // 32),
    )
    k, kb = tl.arange(0, BK), tl.arange(0, BK // PB)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for at in range(0, K, BK):
        x = tl.load(a + r[:, None] * K + (at + k)[None, :])
        y = tl.load(b + s[None, :] * (K // PB) + (at // PB + kb)[:, None])
        u = tl.load(sa + r[:, None] * (K // 32) + (at // 32 + g)[None, :])
        v = tl.load(sb + s[:, None] * (K // 32) + (at // 32 + g)[None, :])
        acc = tl.dot_scaled(x, u, "e4m3", y, v, FB, acc)
    tl.store(c + r[:, None] * N + s[None, :], acc)


__all__ = ["triton"]
