"""What the FP8 kernel reads and writes, in the memory of the bf16 images: an operand of it takes half of theirs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megamoe.backends.hopper.fp8 import CHUNK
from megamoe.shape import MX_BLOCK


@dataclass(frozen=True)
class Fp8Operands:
    """Of a rank with n padded rows, K columns of GEMM1 and F of GEMM2.

    rows float8_e4m3fn [n, K] and features [n, F] are in the order of fp8.to_fp8_order, row_scales fp32 [K / 128, n]
    and feature_scales [F / 128, n] in that of fp8.to_scale_order. GEMM1 writes middle uint8 [n, F], e4m3 codes, and
    exponents uint8 [F / 32, n], their E8M0 scales; `regroup` makes features of them.
    """

    rows: torch.Tensor
    row_scales: torch.Tensor
    middle: torch.Tensor
    exponents: torch.Tensor
    features: torch.Tensor
    feature_scales: torch.Tensor

    @classmethod
    def within(cls, image: torch.Tensor, middle: torch.Tensor) -> Fp8Operands:
        """In images bf16 [n, K] and [n, F], which serve other steps too. n: a multiple of 16; K, F: of 512."""
        n, k = image.shape
        f = middle.shape[1]
        first, second = _Memory(image), _Memory(middle)
        return cls(
            rows=first.take((n, k), torch.float8_e4m3fn),
            row_scales=first.take((k // CHUNK, n), torch.float32),
            exponents=first.take((f // MX_BLOCK, n), torch.uint8),
            feature_scales=first.take((f // CHUNK, n), torch.float32),
            middle=second.take((n, f), torch.uint8),
            features=second.take((n, f), torch.float8_e4m3fn),
        )


class _Memory:
    """Bytes of a tensor that are given away one after the other."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._left = tensor.view(torch.uint8).view(-1)

    def take(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = shape[0] * shape[1] * dtype.itemsize
        taken, self._left = self._left[:num_bytes], self._left[num_bytes:]
        return taken.view(dtype).view(shape)
