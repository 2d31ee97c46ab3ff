"""Launches that begin and end a sub-step, whatever its path."""

from __future__ import annotations

import torch

from megamoe.backends.hopper.device import close, control
from megamoe.backends.hopper.launches import Launches

_TAKE_WORDS = 1024
"""Words of ids that a thread block brings at a time."""
_TAKE_BLOCKS = 64


class ControlLaunches(Launches):
    """Of one rank, on the current stream."""

    def take(self, max_rows: int, request: torch.Tensor | None = None) -> None:
        """The request into the control block, with up to max_rows rows of ids and weights that are on the host.

        request: pinned int64 [record.NUM_WORDS], by default this rank's own.
        """
        b = self.buffers
        pieces = -(-max_rows * b.shape.num_topk // _TAKE_WORDS)
        control.take_kernel[(min(max(pieces, 1), _TAKE_BLOCKS),)](
            b.control,
            b.request if request is None else request,
            NUM_TOPK=b.shape.num_topk,
            BLOCK=_TAKE_WORDS,
            num_warps=4,
        )

    def tell(self) -> None:
        """The status to the host: it is there when this has finished."""
        b = self.buffers
        control.tell_kernel[(1,)](b.control, b.report, num_warps=1, **self._chain)

    def close(self) -> None:
        """Closing flags of a cut step, posted and waited for."""
        b = self.buffers
        close.close_kernel[(1,)](b.control, b.bases, **self._ranks, num_warps=1, **self._chain)

    def abort(self) -> None:
        """Tell all peers that this rank gives the launch up."""
        b = self.buffers
        close.abort_kernel[(1,)](b.control, b.bases, **self._ranks, num_warps=1, **self._chain)
