"""A weight matrix as float32 matmuls like it best, chosen once by its size.

Large matrices are packed for oneDNN (what torch's own compiler does with constant weights): a matmul then does not
pack them again on every call, which at 4 to 64 rows is a quarter to half of its time (1024 x 1024, one core of an AMD
EPYC 9004, torch 2.13: 390 us instead of 720 us at 16 rows). Small ones, and all on a torch without these operators,
are plain matrices. Both compute in fp32; one matrix always takes the same way, so the bits do not change.
"""

from __future__ import annotations

import logging

import torch

logger = logging.getLogger(__name__)

_MIN_PACKED_ELEMENTS = 1 << 18
"""Below 512 x 512 the operator's own overhead is larger than the gain (same machine)."""
_PACKED_FOR_ROWS = 64
_CHECK_REL = 1e-5


class Matrix:
    """w [k, n] float32; `multiply` gives x [m, k] times w."""

    def __init__(self, w: torch.Tensor) -> None:
        self._plain: torch.Tensor | None = w
        if w.numel() >= _MIN_PACKED_ELEMENTS and _packing_works():
            self._packed = _pack(w)
            self._plain = None

    def multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out [m, n] = x [m, k] w, float32."""
        if self._plain is not None:
            torch.mm(x, self._plain, out=out)
        else:
            out.copy_(_linear(x, self._packed))


def _pack(w: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(w.T.contiguous(), _PACKED_FOR_ROWS)
    return packed


def _linear(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return y


_works: bool | None = None


def _packing_works() -> bool:
    """Whether this torch has the operators and they multiply; tried once a process."""
    global _works
    if _works is None:
        generator = torch.Generator().manual_seed(0)
        x, w = torch.randn(8, 64, generator=generator), torch.randn(64, 96, generator=generator)
        try:
            difference = (_linear(x, _pack(w)) - x @ w).norm() / (x @ w).norm()
            _works = float(difference) < _CHECK_REL
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            logger.info("weights stay unpacked: %s", str(error).splitlines()[0])
            _works = False
    return _works
