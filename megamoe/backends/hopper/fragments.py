"""PTX text of the innermost steps of the expert GEMMs: loads, decode of MXFP4 words, and MMA. Plain strings.

The kernels hold everything as one 32-bit register a thread and pass registers to these snippets by name; what a word
and a scale byte mean is explained in packing.py. Operands are `$0, $1, ...`, outputs first.
"""

from __future__ import annotations

from megamoe.backends.hopper.packing import FRAGMENT_MASK, HIGH_BITS, LOW_BIT

STREAM = ".nc.L1::no_allocate"
"""Weights: read once, kept out of L1."""
KEEP = ".L1::evict_last"
"""Token fragments: every warp of a block and every tile of an expert reads them again. Not `.nc`: on small_m the same
launch has written them."""


def load(num_words: int, offset_bytes: int, modifier: str) -> tuple[str, str]:
    """Load 1, 2 or 4 words at an address; (text, constraints)."""
    outputs = ",".join(f"${i}" for i in range(num_words))
    vector = f".v{num_words}" if num_words > 1 else ""
    braces = f"{{{outputs}}}" if num_words > 1 else outputs
    text = f"ld.global{modifier}{vector}.b32 {braces}, [${num_words}+{offset_bytes}];"
    return text, ",".join(["=r"] * num_words) + ",l"


def load_half_word(offset_bytes: int, modifier: str) -> tuple[str, str]:
    """Load 2 bytes at an address into the low half of a register."""
    text = f"{{\n.reg .b16 h;\nld.global{modifier}.b16 h, [$1+{offset_bytes}];\ncvt.u32.u16 $0, h;\n}}"
    return text, "=r,l"


def decode(word: str, registers: tuple[str, str, str, str], factors: tuple[str, str]) -> list[str]:
    """One word -> the four A registers of an MMA step, scaled. factors: of rows g and g + 8. Uses t, u.

    10 integer instructions here (9 after ptxas has merged two) and 4 multiplications, for 8 weights.
    """
    a0, a1, a2, a3 = registers
    low, high = factors
    return [
        f"and.b32 t, {word}, {FRAGMENT_MASK};",
        f"mul.bf16x2 {a0}, t, {low};",
        f"shl.b32 t, {word}, 6;",
        f"and.b32 t, t, {FRAGMENT_MASK};",
        f"mul.bf16x2 {a1}, t, {high};",
        f"shf.r.wrap.b32 t, {word}, {word}, 4;",
        f"and.b32 t, t, {FRAGMENT_MASK};",
        f"mul.bf16x2 {a2}, t, {low};",
        f"shf.r.wrap.b32 t, {word}, {word}, 6;",
        f"shl.b32 u, {word}, 2;",
        f"and.b32 u, u, {LOW_BIT};",
        f"and.b32 t, t, {HIGH_BITS};",
        "or.b32 t, t, u;",
        f"mul.bf16x2 {a3}, t, {high};",
    ]


def multiplier(out: str, scale_word: str, byte: int) -> list[str]:
    """bf16x2 of 2^(u - 127) from byte `byte` of a word of scale bytes u: [0, u, 0, u] shifted right by one."""
    return [
        f"prmt.b32 {out}, {scale_word}, 0, {(byte << 12) | (4 << 8) | (byte << 4) | 4};",
        f"shr.u32 {out}, {out}, 1;",
    ]


def mma_steps(num_steps: int, num_blocks: int, odd_tile: bool) -> tuple[str, str]:
    """num_steps MMA steps (16 of K each) of a tile of 16 rows times num_blocks x 8 tokens.

    Outputs: 4 * num_blocks fp32. Inputs: num_steps words, the scale word of a pair of tiles (odd_tile: its upper
    half), 2 * num_steps token registers for each block, then the 4 * num_blocks accumulators.
    """
    num_acc = 4 * num_blocks
    words = [f"${num_acc + i}" for i in range(num_steps)]
    scale = f"${num_acc + num_steps}"
    first_token = num_acc + num_steps + 1
    num_tokens = 2 * num_steps * num_blocks
    first_acc = first_token + num_tokens
    lines = ["{", ".reg .b32 m0,m1,a0,a1,a2,a3,t,u;"]
    lines.append(".reg .f32 " + ",".join(f"c{i}" for i in range(num_acc)) + ";")
    lines += [f"mov.f32 c{i}, ${first_acc + i};" for i in range(num_acc)]
    for row_half in range(2):
        lines += multiplier(f"m{row_half}", scale, 2 * odd_tile + row_half)
    for step, word in enumerate(words):
        lines += decode(word, ("a0", "a1", "a2", "a3"), ("m0", "m1"))
        for block in range(num_blocks):
            acc = ",".join(f"c{4 * block + i}" for i in range(4))
            tokens = ",".join(f"${first_token + 2 * (num_steps * block + step) + i}" for i in range(2))
            lines.append(
                "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                f"{{{acc}}}, {{a0,a1,a2,a3}}, {{{tokens}}}, {{{acc}}};"
            )
    lines += [f"mov.f32 ${i}, c{i};" for i in range(num_acc)]
    lines.append("}")
    constraints = ["=f"] * num_acc + ["r"] * (num_steps + 1 + num_tokens) + ["f"] * num_acc
    return "\n".join(lines), ",".join(constraints)


def decode_pair(scale_half: int) -> tuple[str, str]:
    """Two words -> 8 bf16x2 A registers for wgmma, as elements of a pack of two threads' worth: pack = 2.

    Inputs: $8, $9 the words; $10, $11 the scale word of both (the same register twice). scale_half: which half of
    the scale word belongs to the words' chunk.
    """
    lines = ["{", ".reg .b32 m0,m1,t,u;"]
    for row_half in range(2):
        lines += multiplier(f"m{row_half}", "$10", 2 * scale_half + row_half)
    for which in range(2):
        out = tuple(f"${4 * which + i}" for i in range(4))
        lines += decode(f"${8 + which}", (out[0], out[1], out[2], out[3]), ("m0", "m1"))
    lines.append("}")
    return "\n".join(lines), ",".join(["=&r"] * 8 + ["r"] * 4)
