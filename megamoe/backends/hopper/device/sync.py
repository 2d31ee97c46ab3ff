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
TICKET = tl.constexpr(int(Word.TICKET))
# One thread of a block looks: all threads of all blocks at one address are in the way of those that arrive.
_SPIN = """{{
.reg .pred p;
.reg .b32 t;
.reg .b{bits} seen;
mov.u32 t, %tid.x;
setp.ne.u32 p, t, 0;
@p bra DONE;
AGAIN:
ld.acquire.gpu.global.b{bits} seen, [$1];
setp.lt.s{bits} p, seen, $2;
@p bra AGAIN;
DONE:
mov.u32 $0, 0;
}}"""
SPIN = tl.constexpr(_SPIN.format(bits=64))
SPIN_WORD = tl.constexpr(_SPIN.format(bits=32))
# Of a part of a thread block the first thread looks, by its number there.
SPIN_PART = tl.constexpr(_SPIN.format(bits=64).replace("mov.u32 t, %tid.x;", "mov.b32 t, $3;"))
# A warp that copies by TMA looks with all of its threads: else ptxas takes what follows for divergent, and every copy
# needs twice the instructions.
_SPIN_WARP = """{{
.reg .pred p;
.reg .b{bits} seen;
AGAIN:
ld.acquire.gpu.global.b{bits} seen, [$1];
setp.lt.s{bits} p, seen, $2;
@p bra AGAIN;
mov.u32 $0, 0;
}}"""
SPIN_WARP = tl.constexpr(_SPIN_WARP.format(bits=64))
SPIN_WORD_WARP = tl.constexpr(_SPIN_WARP.format(bits=32))
DRAW = tl.constexpr("""{
.reg .pred p;
setp.eq.s32 p, $2, 0;
mov.b32 $0, 0;
@p atom.global.relaxed.gpu.add.u32 $0, [$1], 1;
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
def await_word(counter, number):
    """The same of a 32-bit counter."""
    tl.inline_asm_elementwise(
        SPIN_WORD, "=r,l,r", [counter.to(tl.int64), number], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.debug_barrier()


@triton.jit
def await_part(counter, number, thread):
    """await_count for a part of a thread block. thread: the number of each of its threads."""
    tl.inline_asm_elementwise(
        SPIN_PART,
        "=r,l,l,r",
        [counter.to(tl.int64) + 0 * thread, number.to(tl.int64) + 0 * thread, thread],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.debug_barrier()


@triton.jit
def await_warp(counter, number):
    """await_count for one warp."""
    tl.inline_asm_elementwise(
        SPIN_WARP,
        "=r,l,l",
        [counter.to(tl.int64), number.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.debug_barrier()


@triton.jit
def await_word_warp(counter, number):
    """The same of a 32-bit counter."""
    tl.inline_asm_elementwise(
        SPIN_WORD_WARP, "=r,l,r", [counter.to(tl.int64), number], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.debug_barrier()


@triton.jit
def count_in(counter):
    """Count this thread block in, with everything it has written."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
def acquire(addresses):
    """Words that other thread blocks count in. Whoever sees a number of them sees what they wrote."""
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];",
        "=r,l",
        [addresses.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def draw(queue, tid):
    """Ask for this thread block's next ticket: 0, 1, ... over all of them. Thread 0 gets it, later."""
    return tl.inline_asm_elementwise(
        DRAW, "=&r,l,r", [queue.to(tl.int64) + 0 * tid, tid], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def drawn(ticket):
    """The ticket, for all threads."""
    return tl.sum(ticket, axis=0)


@triton.jit
def fence_proxies():
    """Between ordinary stores and TMA loads of the same memory in one launch: on both sides, next to the counter."""
    tl.inline_asm_elementwise(
        "fence.proxy.async;\nmov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def fence_global_proxies():
    """The same, for stores to global memory alone: it does not wait for others."""
    tl.inline_asm_elementwise(
        "fence.proxy.async.global;\nmov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )
