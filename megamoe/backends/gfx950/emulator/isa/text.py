"""Assembly text of a decoded instruction, in LLVM's syntax."""

from __future__ import annotations

import struct

from megamoe.backends.gfx950.emulator.isa.instruction import ACC_BASE, Instruction, Kind, Operand
from megamoe.backends.gfx950.emulator.isa.operands import value_type

_NAMED = {
    106: "vcc_lo", 107: "vcc_hi", 124: "m0", 126: "exec_lo", 127: "exec_hi", 102: "flat_scratch_lo",
    103: "flat_scratch_hi", 104: "xnack_mask_lo", 105: "xnack_mask_hi",
}  # fmt: skip
_PAIRS = {106: "vcc", 126: "exec", 102: "flat_scratch", 104: "xnack_mask"}
_SPECIAL = {235: "src_shared_base", 236: "src_shared_limit", 237: "src_private_base", 238: "src_private_limit",
            239: "src_pops_exiting_wave_id", 251: "src_vccz", 252: "src_execz", 253: "src_scc"}  # fmt: skip
_FLOAT_CODES = {240: "0.5", 241: "-0.5", 242: "1.0", 243: "-1.0", 244: "2.0", 245: "-2.0", 246: "4.0", 247: "-4.0",
                248: "0.15915494"}  # fmt: skip


def _operand(o: Operand, kind: str = "f") -> str:
    if o.kind is Kind.NONE:
        return "off"
    if o.kind is Kind.SPECIAL:
        return _SPECIAL[o.idx]
    if o.kind is Kind.CONST:
        if o.code in _FLOAT_CODES:
            return _FLOAT_CODES[o.code] + ("309189532" if o.code == 248 and kind == "d" else "")
        if o.literal:
            return f"{(o.value >> 32 if kind == 'd' else o.value) & 0xFFFFFFFF:#x}"
        return str(o.code - 128 if o.code <= 192 else 192 - o.code)
    if o.kind is Kind.SGPR:
        if o.width == 2 and o.idx in _PAIRS:
            return _PAIRS[o.idx]
        if o.idx in _NAMED and o.width == 1:
            return _NAMED[o.idx]
        letter, first = ("s", o.idx) if o.idx < 108 else ("ttmp", o.idx - 108)
    else:
        letter, first = ("a", o.idx - ACC_BASE) if o.idx >= ACC_BASE else ("v", o.idx)
    return f"{letter}{first}" if o.width == 1 else f"{letter}[{first}:{first + o.width - 1}]"


def _flags(i: Instruction, names: tuple[str, ...]) -> str:
    return "".join(f" {name}" for name in names if i.mods.get(name))


def _bits(value: int, count: int) -> str:
    return "[" + ",".join(str(value >> k & 1) for k in range(count)) + "]"


def _waitcnt(simm: int) -> str:
    vm, exp, lgkm = simm & 15 | simm >> 10 & 0x30, simm >> 4 & 7, simm >> 8 & 15
    parts = [
        f"{n}({v})"
        for n, v, top in (("vmcnt", vm, 63), ("expcnt", exp, 7), ("lgkmcnt", lgkm, 15))
        if v != top
    ]
    return " ".join(parts) or hex(simm)


def _scalar(i: Instruction) -> str:
    name, simm = i.mnemonic, i.mods.get("simm", 0)
    if i.encoding == "SOPP" and name != "s_set_gpr_idx_mode":
        if name == "s_waitcnt":
            return f"{name} {_waitcnt(simm)}"
        return (
            f"{name} {simm}"
            if name
            not in ("s_endpgm", "s_barrier", "s_wakeup", "s_icache_inv", "s_ttracedata", "s_set_gpr_idx_off")
            else name
        )
    if name.startswith("s_set_gpr_idx_") and i.encoding in ("SOPC", "SOPP"):
        places = ",".join(p for k, p in enumerate(("SRC0", "SRC1", "SRC2", "DST")) if simm >> k & 1)
        return f"{name} " + ", ".join([*(_operand(o) for o in i.srcs), f"gpr_idx({places})"])
    operands = [_operand(o, value_type(name)) for o in ([i.dst] if i.dst.kind else []) + i.srcs]
    if i.encoding == "SOPK":
        operands = [_operand(i.dst if i.dst.kind else i.srcs[0]), hex(simm)]
        if "setreg" in name:
            operands = [hex(simm), _operand(i.srcs[0])]
    if i.encoding == "SMEM" and i.srcs:
        offset = i.mods.get("offset", 0)
        if len(i.srcs) == 1:
            operands.append(hex(offset))
        elif offset:
            operands[-1] += f" offset:{offset:#x}"
    return f"{name} " + ", ".join(operands) if operands else name


def _vector(i: Instruction) -> str:
    name, kind = i.mnemonic, value_type(i.mnemonic)
    mods, parts = i.mods, []
    if i.dst.kind:
        parts.append(_operand(i.dst))
    if i.sdst.kind and i.sdst is not i.dst:
        parts.append(_operand(i.sdst))
    for k, o in enumerate(i.srcs):
        text = _operand(o, kind)
        if i.encoding != "VOP3P":
            text = f"|{text}|" if mods.get("abs", 0) >> k & 1 else text
            text = f"-{text}" if mods.get("neg", 0) >> k & 1 else text
        if mods.get("src0_sext" if k == 0 else "src1_sext") and k < 2:
            text = f"sext({text})"
        parts.append(text)
    suffix = ""
    if i.encoding == "VOP3" and name not in ("v_readlane_b32", "v_writelane_b32"):
        suffix = "_e64"
    elif mods.get("has_dpp"):
        suffix = "_dpp"
    elif mods.get("has_sdwa"):
        suffix = "_sdwa"
    elif i.encoding in ("VOP1", "VOP2", "VOPC"):
        suffix = "_e32"
    text = f"{name}{suffix} " + ", ".join(parts) if parts else name
    return text + _vector_modifiers(i)


def _vector_modifiers(i: Instruction) -> str:
    mods, out, count = i.mods, "", len(i.srcs)
    mfma = i.mnemonic.startswith(("v_mfma", "v_smfmac"))
    if i.encoding == "VOP3P" and not mfma and "accvgpr" not in i.mnemonic:
        full = (1 << count) - 1
        sel, high = mods.get("opsel", 0), mods.get("opsel_hi", 0) & full
        mix = "mix" in i.mnemonic
        if sel:
            out += f" op_sel:{_bits(sel, count)}"
        if high != (0 if mix else full):
            out += f" op_sel_hi:{_bits(high, count)}"
        for key, label in (("neg", "neg_lo"), ("neg_hi", "neg_hi")):
            if mods.get(key):
                out += f" {label}:{_bits(mods[key], count)}"
    elif i.encoding == "VOP3" and mods.get("opsel"):
        out += f" op_sel:{_bits(mods['opsel'] & (1 << count) - 1 | (mods['opsel'] >> 3 & 1) << count, count + 1)}"
    if "scale_f32" in i.mnemonic:
        out += f" op_sel:{_bits(mods.get('opsel', 0), 2)}" if mods.get("opsel") else ""
        out += f" op_sel_hi:{_bits(mods.get('opsel_hi', 0), 2)}" if mods.get("opsel_hi") else ""
    out += f" bitop3:{mods['bitop3']:#x}" if mods.get("bitop3") else ""
    out += " clamp" if mods.get("clamp") else ""
    out += {1: " mul:2", 2: " mul:4", 3: " div:2"}.get(mods.get("omod", 0), "")
    out += "".join(f" {n}:{mods[n]}" for n in ("cbsz", "abid", "blgp") if mods.get(n))
    if mods.get("has_dpp"):
        fields = (("dpp_ctrl", "dpp"), ("row_mask", "row_mask"), ("bank_mask", "bank_mask"))
        out += "".join(f" {label}:{mods.get(key, 0):#x}" for label, key in fields)
        out += " bound_ctrl:1" if mods.get("bound_ctrl") else ""
    if mods.get("has_sdwa"):
        out += "".join(f" {n}:{mods.get(n, 0)}" for n in ("dst_sel", "dst_unused", "src0_sel", "src1_sel"))
    return out


def _memory(i: Instruction) -> str:
    mods = i.mods
    parts = [_operand(i.dst)] if i.dst.kind else []
    if i.encoding == "DS":
        parts += [_operand(o) for o in i.srcs]
        two = "read2" in i.mnemonic or "write2" in i.mnemonic or "wrxchg2" in i.mnemonic
        text = "".join(
            f" {label}:{mods[key]}"
            for key, label in (("offset", "offset0" if two else "offset"), ("offset1", "offset1"))
            if mods.get(key)
        )
        return f"{i.mnemonic} " + ", ".join(parts) + text + _flags(i, ("gds",))
    if i.encoding in ("MUBUF", "MTBUF"):
        if not i.srcs:
            return i.mnemonic + _flags(i, ("sc0", "nt", "sc1"))
        address, resource, soffset, data = i.srcs
        parts = [_operand(data)] if data.kind else parts
        parts += [_operand(address), _operand(resource), _operand(soffset)]
        text = f" format:{mods.get('simm', 0)}" if i.encoding == "MTBUF" else ""
        text += _flags(i, ("idxen", "offen")) + (f" offset:{mods['offset']}" if mods.get("offset") else "")
        return f"{i.mnemonic} " + ", ".join(parts) + text + _flags(i, ("sc0", "nt", "sc1", "lds"))
    parts += [_operand(o) for o in i.srcs[:-1]]
    if not i.mnemonic.startswith("flat"):
        parts.append(_operand(i.srcs[-1]))
    text = f" offset:{mods['offset']}" if mods.get("offset") else ""
    return f"{i.mnemonic} " + ", ".join(parts) + text + _flags(i, ("sc0", "nt", "sc1"))


def disassemble(i: Instruction) -> str:
    """One line of assembly. DPP and SDWA controls are written as numbers."""
    if i.encoding in ("SOP1", "SOP2", "SOPC", "SOPK", "SOPP", "SMEM"):
        return _scalar(i)
    if i.encoding in ("DS", "FLAT", "MUBUF", "MTBUF"):
        return _memory(i)
    return _vector(i)


def literal_float(value: int) -> float:
    """A 32-bit literal as the float that it may stand for."""
    return float(struct.unpack("<f", struct.pack("<I", value & 0xFFFFFFFF))[0])
