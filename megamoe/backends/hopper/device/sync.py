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
ANSWERED = tl.constexpr(int(Word.ANSWERED))
# One thread of a block looks: all threads of all blocks at one address are in the way of those that arrive.
SPIN = tl.constexpr("""{
.reg .pred p;
.reg .b32 t;
.reg .b64 seen;
mov.u32 t, %tid.x;
setp.ne.u32 p, t, 0;
@p bra DONE;
AGAIN:
ld.acquire.gpu.global.b64 seen, [$1];
setp.lt.s64 p, seen, $2;
@p bra AGAIN;
DONE:
mov.u32 $0, 0;
}""")


@triton.jit
def arrive(counter):
    """Count this thread block in, with everything it has written. Returns how many came before."""
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")


@triton.jit
def await_count(counter, number):
    """Wait until `number` thread blocks have arrived, and see what they wrote."""
    tl.inline_asm_elementwise(
        SPIN, "=r,l,l", [counter.to(tl.int64), number], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.debug_barrier()


@triton.jit
def fence_proxies():
    """Between ordinary stores and TMA loads of the same memory in one launch: on both sides, next to the counter."""
    tl.inline_asm_elementwise(
        "fence.proxy.async;\nmov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )
