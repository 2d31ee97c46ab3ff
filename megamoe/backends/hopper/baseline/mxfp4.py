"""Experts in MXFP4 through OpenAI's triton_kernels, whose files the caller has.

Its matmul takes bf16 rows and weights swizzled for Hopper, decodes them on the fly, and applies the activation of
GEMM1 in its epilogue. Written for the interface of the package that belongs to Triton 3.6.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path as FilePath
from typing import Any

import torch

from megamoe.backends.hopper.baseline.layer import Baseline
from megamoe.backends.hopper.baseline.routes import Routes
from megamoe.errors import ConfigError, must_be
from megamoe.shape import MoeShape

PACKAGE = "triton_kernels"
_WARPS = 8
"""That its scales are swizzled for."""


def find_package(folder: FilePath) -> FilePath:
    """The folder to import the package from, given that or the package itself. Raises ConfigError: it is not there."""
    for parent in (folder, folder.parent):
        if (parent / PACKAGE / "matmul.py").is_file() and (parent == folder or folder.name == PACKAGE):
            return parent.absolute()
    wanted = f"a folder with the package {PACKAGE} of Triton 3.6 (python/{PACKAGE} of its sources)"
    raise ConfigError(must_be("triton_kernels", wanted, folder))


def check_package(folder: FilePath) -> None:
    """Raises ConfigError: the package is not there or does not import with the Triton that is installed."""
    parent = str(find_package(folder))
    sys.path.insert(0, parent)
    try:
        import_module(f"{PACKAGE}.matmul")
    except ImportError as error:
        raise ConfigError(must_be("triton_kernels", "files that fit the installed Triton", error)) from error
    finally:
        sys.path.remove(parent)


class Mxfp4(Baseline):
    """w13 codes uint8 [experts, 2 * intermediate, hidden / 2] and E8M0 scales [experts, 2 * intermediate, hidden / 32],
    gate rows first; w2 likewise [experts, hidden, intermediate / 2] and / 32."""

    def __init__(
        self,
        shape: MoeShape,
        w13: tuple[torch.Tensor, torch.Tensor],
        w2: tuple[torch.Tensor, torch.Tensor],
        folder: FilePath,
    ) -> None:
        super().__init__(shape)
        parent = str(find_package(folder))
        if parent not in sys.path:
            sys.path.insert(0, parent)
        self._matmul = import_module(f"{PACKAGE}.matmul")
        self._tensor = import_module(f"{PACKAGE}.tensor")
        # Gate and up rows take turns: a pair makes one column of the activation.
        pairs = [part.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2) for part in w13]
        self._w13, self._w13_precision = self._swizzled(*pairs)
        self._w2, self._w2_precision = self._swizzled(*w2)
        self._activation = self._swiglu(shape.swiglu_limit)
        self._latest: tuple[Routes | None, Any, Any] = (None, None, None)

    @classmethod
    def random(cls, shape: MoeShape, device: torch.device, seed: int, folder: FilePath) -> Mxfp4:
        """Codes of all kinds, scales that keep outputs near unit variance."""
        generator = torch.Generator(device).manual_seed(seed)

        def matrix(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
            def draw(low: int, high: int, width: int) -> torch.Tensor:
                size = (shape.num_experts_per_rank, rows, width)
                return torch.randint(low, high, size, dtype=torch.uint8, device=device, generator=generator)

            return draw(0, 256, columns // 2), draw(117, 121, columns // 32)

        return cls(
            shape,
            matrix(2 * shape.intermediate, shape.hidden),
            matrix(shape.hidden, shape.intermediate),
            folder,
        )

    def experts(self, received: torch.Tensor, routes: Routes) -> torch.Tensor:
        if not len(received):
            return received
        ragged, order = self._tables(routes)
        middle = self._matmul.matmul(
            received,
            self._w13,
            None,
            a_ragged_metadata=ragged,
            gather_indx=order,
            precision_config=self._w13_precision,
            fused_activation=self._activation,
        )
        rows: torch.Tensor = self._matmul.matmul(
            middle,
            self._w2,
            None,
            a_ragged_metadata=ragged,
            scatter_indx=order,
            precision_config=self._w2_precision,
        )
        return rows

    def _tables(self, routes: Routes) -> tuple[Any, torch.Tensor]:
        """(where each expert's rows begin, order by expert as int32); made by the first call of a step's routing, which
        is not timed."""
        if self._latest[0] is not routes:
            sizes = routes.ends.diff(prepend=routes.ends.new_zeros(1))
            ragged = self._tensor.make_ragged_tensor_metadata(sizes, len(routes.by_expert))
            self._latest = (routes, ragged, routes.by_expert.int())
        return self._latest[1:]

    def _swizzled(self, codes: torch.Tensor, scales: torch.Tensor) -> tuple[Any, Any]:
        """(weights, precision) of a matrix [experts, rows, columns]; the package wants [experts, columns, rows]."""
        layout = import_module(f"{PACKAGE}.tensor_details.layout")
        tensor = self._tensor
        value_layout, value_options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
        scale_layout, scale_options = layout.make_default_matmul_mxfp4_w_scale_layout(
            mx_axis=1, num_warps=_WARPS
        )
        columns_first = tensor.wrap_torch_tensor(codes.contiguous().transpose(1, 2), dtype=tensor.FP4)
        weights = tensor.convert_layout(columns_first, value_layout, **value_options)
        scale = tensor.wrap_torch_tensor(scales.contiguous().transpose(1, 2))
        swizzled = tensor.convert_layout(scale, scale_layout, **scale_options)
        return weights, self._matmul.PrecisionConfig(b_mx_scale=swizzled, out_dtype=torch.bfloat16)

    def _swiglu(self, limit: float) -> Any:
        from megamoe.backends.hopper.device.baseline_swiglu import swiglu

        specs = self._matmul.FnSpecs("megamoe_swiglu", swiglu, ("swiglu_limit",), reduction_n=2)
        return self._matmul.FusedActivation(specs, (limit or float("inf"),))
