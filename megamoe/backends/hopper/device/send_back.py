"""Send back: peers' result rows, which GEMM2 left in this rank's memory, to their sources over NVLink.

Only for ranks on other GPUs. GEMM2 itself would write each row in pieces of 256 bytes; that way 353 MB took 5.5 ms
longer than locally (two H200s, 8192 tokens a rank), a copy of whole rows takes 1 ms.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megamoe.backends.hopper import plan
from megamoe.backends.hopper.device import chain

ROWS = tl.constexpr(plan.BLOCK_ROWS)
NUM_BLOCKS = tl.constexpr(plan.Counter.NUM_BLOCKS)


@triton.jit
def send_back_kernel(
    row_return, image, block_info, work, WORDS: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr
):
    """Persistent over (row, BLOCK words of 4 bytes). row_return: address at the source, 0 = the row is not a peer's.
    image: [rows, STRIDE words], of which WORDS are a result row."""
    chain.after_previous()
    PIECES: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK
    num_items = tl.load(work + NUM_BLOCKS) * (ROWS * PIECES)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        row = item // PIECES
        if row % ROWS < (tl.load(block_info + row // ROWS) & 0xFF):
            address = tl.load(row_return + row)
            if address != 0:
                word = item % PIECES * BLOCK + tl.arange(0, BLOCK)
                inside = word < WORDS
                place = tl.full((), 0, tl.int64) + row
                value = tl.load(image + place * STRIDE + word, mask=inside)
                tl.store(address.to(tl.pointer_type(tl.int32)) + word, value, mask=inside)
