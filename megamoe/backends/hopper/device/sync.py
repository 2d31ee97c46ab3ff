"""Thread blocks of one launch among themselves: counters in the control block, which every launch begins with zeroed.

Only for launches whose thread blocks are all on the device at once. All of them arrive at every counter, also when
a wait for a peer has failed, so that these waits need no bound of their own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megamoe.backends.hopper.record import Word

DISPATCHED = tl.constexpr(int(Word.DISPATCHED))
INDEXED = tl.constexpr(int(Word.INDEXED))
EXPANDED = tl.constexpr(int(Word.EXPANDED))
MULTIPLIED = tl.constexpr(int(Word.MULTIPLIED))
RETURNED = tl.constexpr(int(Word.RETURNED))


@triton.jit
def arrive(counter):
    """Count this thread block in, with everything it has written, by whatever way it is read. Returns how many came
    before."""
    # TMA reads what ordinary stores have written: both sides need the fence between the two ways.
    fence_proxies()
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")


@triton.jit
def await_count(counter, number):
    """Wait until `number` thread blocks have arrived, and see what they wrote."""
    seen = _acquire(counter)
    while seen < number:
        seen = _acquire(counter)
    fence_proxies()
    tl.debug_barrier()


@triton.jit
def _acquire(counter):
    """Every thread reads, so that every thread has acquired."""
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b64 $0, [$1];",
        "=l,l",
        [counter.to(tl.int64)],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )


@triton.jit
def fence_proxies():
    tl.inline_asm_elementwise(
        "fence.proxy.async;\nmov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )
