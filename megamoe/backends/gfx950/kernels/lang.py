"""What all kernels are written with: typed pointers, wave-uniform values, lane reductions, MX arithmetic."""

import flydsl.expr as fx
from flydsl._mlir.dialects import llvm
from flydsl.expr import rocdl
from flydsl.expr.typing import T
from flydsl.expr.typing import Vector as Vec

WAVE = 64
# DPP controls: lanes of a quad exchanged, halves of 8 and of 16 lanes mirrored.
_SWAP_1, _SWAP_2, _MIRROR_8, _MIRROR_16 = 0xB1, 0x4E, 0x141, 0x140
_NON_TEMPORAL = 2
_MAX_FINITE = 0x7F7FFFFF
# From the bits of a block's maximum to those of its scale: minus 448's exponent, plus the carry of a larger mantissa.
_TO_SCALE = 0x1FFFFF - (8 << 23)


def pointer(address, kind, alignment):
    """Global pointer to elements of `kind` at a byte address (Int64)."""
    return fx.inttoptr(
        fx.PointerType.get(elem_ty=kind.ir_type, address_space=fx.AddressSpace.Global, alignment=alignment),
        address,
    )


def words(address):
    """Global pointer to 32-bit words."""
    return pointer(address, fx.Int32, 4)


def wide(address):
    """Global pointer to 32-bit words that lie 16-byte aligned, for loads and stores of four."""
    return pointer(address, fx.Int32, 16)


def long(value):
    return fx.Int64(value)


def buffer(address):
    """Descriptor of the memory from a wave-uniform address on, for `load_wide`."""
    return rocdl.get_buffer_rsrc(rocdl.make_buffer_ptr(wide(address)))


def load_wide(descriptor, offset, uniform_offset, streaming=False):
    """Four 32-bit words from a lane's and a wave's byte offset: one vector register of address, however far it moves.

    streaming: not to be kept in the caches.
    """
    kind = Vec.make_type(4, fx.Int32)
    aux = _NON_TEMPORAL if streaming else 0
    return Vec(rocdl.raw_ptr_buffer_load(kind, descriptor, offset, uniform_offset, aux), (4,), fx.Int32)


def uniform(value):
    """A value that is the same in all lanes, in a scalar register."""
    return fx.Int32(rocdl.readfirstlane(T.i32, value))


def of_lane(value, lane):
    """Int32 of one lane, a Python number, in a scalar register."""
    return fx.Int32(rocdl.readlane(T.i32, value.ir_value(), fx.Int32(lane).ir_value()))


def control_word(control, word):
    """A word of the control block as Int64, in scalar registers."""
    value = fx.generic_load(pointer(control, fx.Int64, 8) + int(word))
    low, high = uniform(fx.Int32(value)), uniform(fx.Int32(value >> 32))
    return (fx.Int64(high) << 32) | (fx.Int64(low) & 0xFFFFFFFF)


def control_int(control, word):
    """The low half of a word of the control block."""
    return uniform(fx.generic_load(words(control) + 2 * int(word)))


def opaque(value):
    """A Python number as Int32 that the compiler does not know, so that it does not unroll a loop of so many turns."""
    return fx.Int32(llvm.inline_asm(T.i32, [], f"s_mov_b32 $0, {value}", "=s", has_side_effects=False))


def bits(value):
    """The bits of a Float32 as Int32."""
    return value.bitcast(fx.Int32)


def as_float(value):
    """Int32 bits as Float32."""
    return value.bitcast(fx.Float32)


def dpp(value, control):
    """Int32 of another lane, by a DPP control that covers all lanes."""
    raw = value.ir_value()
    return fx.Int32(rocdl.update_dpp(T.i32, raw, raw, control, 0xF, 0xF, True))


def max_of_lanes(value, num_lanes):
    """Maximum of non-negative Int32 over aligned groups of 4, 8 or 16 lanes, in all of them."""
    controls = {4: (_SWAP_1, _SWAP_2), 8: (_SWAP_1, _SWAP_2, _MIRROR_8)}
    for control in controls.get(num_lanes, (_SWAP_1, _SWAP_2, _MIRROR_8, _MIRROR_16)):
        other = dpp(value, control)
        value = (value > other).select(value, other)
    return value


def sum_up_to_lane(value):
    """Sum of an Int32 over the lanes up to and with this one."""
    lane = fx.thread_idx.x % WAVE
    for distance in (1, 2, 4, 8, 16, 32):
        other = fx.shuffle_up(value, distance, WAVE)
        value = value + (lane >= distance).select(other, fx.Int32(0))
    return value


def ballot(predicate):
    """64-bit mask of the lanes where the predicate holds, as Int64."""
    return fx.Int64(rocdl.ballot(T.i64, predicate))


def lanes_below(mask):
    """How many bits of a ballot lie below this lane."""
    low = rocdl.mbcnt_lo(T.i32, fx.Int32(mask).ir_value(), fx.Int32(0).ir_value())
    return fx.Int32(rocdl.mbcnt_hi(T.i32, fx.Int32(mask >> 32).ir_value(), low))


def popcount(mask):
    """Bits set in an Int64, as Int32."""
    return fx.Int32(fx.ctpop(mask))


def clock():
    """The device's constant clock in ticks, Int64."""
    return fx.Int64(llvm.call_intrinsic(T.i64, "llvm.amdgcn.s.memrealtime", [], [], []))


# ------------------------------------------------------------------------------------------------ MX arithmetic


def scale_of(top_bits):
    """Bits of a block's maximum -> (E8M0 byte, Float32 that divides by the scale, whether the block is finite).

    Rule "up": the smallest power of two with which the maximum fits e4m3. A block that is not finite has scale 0xFF and
    its elements multiplied by zero's bits; scales stop at 2^-127.
    """
    finite = top_bits <= _MAX_FINITE
    biased = top_bits + _TO_SCALE
    scale_bits = (biased > 0).select(biased, fx.Int32(0)) & 0x7F800000
    byte = finite.select(scale_bits >> 23, fx.Int32(0xFF))
    return byte, as_float(fx.Int32(254 << 23) - scale_bits), finite


def encode_pair(low, high, reciprocal, finite, old, upper):
    """Two Float32 over the scale as e4m3 in the lower or upper half of an Int32."""
    zero = fx.Float32(0.0)
    a, b = finite.select(low * reciprocal, zero), finite.select(high * reciprocal, zero)
    return fx.Int32(rocdl.cvt_pk_fp8_f32(T.i32, a, b, old, upper))


def encode_four(values, reciprocal, finite):
    """Four Float32 as e4m3 in an Int32, the first lowest."""
    half = encode_pair(values[0], values[1], reciprocal, finite, fx.Int32(0), False)
    return encode_pair(values[2], values[3], reciprocal, finite, half, True)


def decode_four(codes):
    """Int32 of four e4m3 -> four Float32."""
    out = []
    for upper in (False, True):
        pair = Vec(rocdl.cvt_pk_f32_fp8(Vec.make_type(2, fx.Float32), codes, upper), (2,), fx.Float32)
        out += [pair[0], pair[1]]
    return out


def scale_value(byte):
    """E8M0 byte (Int32) -> Float32 factor; 0xFF gives Inf, which times a zero code is NaN."""
    return as_float((byte > 0).select(byte << 23, fx.Int32(0x00400000)))


def bf16_pair(word):
    """Int32 of two bf16 -> two Float32."""
    return as_float(word << 16), as_float(word & fx.Int32(-65536))


def pack_bf16(low, high):
    """Two Float32 rounded to nearest even, as bf16 in an Int32."""
    pair = Vec.from_elements([fx.BFloat16(low), fx.BFloat16(high)], fx.BFloat16)
    return pair.bitcast(fx.Int32)[0]


def absolute_bits(value):
    """The sign-less bits of a Float32: they order like its magnitude, NaN and Inf above all finite values."""
    return bits(value) & 0x7FFFFFFF


def larger(a, b):
    return (a > b).select(a, b)


def sf_offset(block):
    """Where the scale of a row's MX block lies among the row's scales (MFMA order: see shuffle.py)."""
    return (block // 16) * 16 + (block % 4) * 4 + (block // 4) % 4


__all__ = [name for name in dir() if not name.startswith("_") and name not in ("flyc", "range_constexpr")]
