"""Hold the wire contract to its committed baseline: an old caller must be able to talk to a new service.

Owns: the rules of what breaks a caller, and `proto/baseline.binpb` (a FileDescriptorSet).
Refuses: any file, message, field, enum, enum value, oneof, service or method that was removed, renamed, renumbered,
retyped, or whose streaming changed. Additions are welcome, but must enter the baseline (`--update`), since only what
the baseline holds is protected. `--accept-breaks` writes a baseline in spite of breaks: for a new major version only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

if __package__ in (None, ""):  # run as a script: `tools` is then not a package on the path
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.gen_proto import PROTO_ROOT, ProtoError, descriptor_set

BASELINE = PROTO_ROOT / "baseline.binpb"


class _Named(Protocol):
    """Anything in a descriptor that has a name."""

    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=_Named)


def breaks(old: FileDescriptorSet, new: FileDescriptorSet) -> list[str]:
    """One sentence for every way in which `new` breaks a caller built from `old`; empty when none does."""
    return list(_each("file", "", old.file, new.file, _file_breaks))


def _each(
    kind: str, where: str, old: Iterable[N], new: Iterable[N], compare: Callable[[str, N, N], Iterable[str]]
) -> Iterator[str]:
    """Pair by name; a missing one is a break, a pair is compared."""
    by_name = {item.name: item for item in new}
    for item in old:
        full = f"{where}.{item.name}" if where else item.name
        if item.name not in by_name:
            yield f"{kind} {full} was removed or renamed"
        else:
            yield from compare(full, item, by_name[item.name])


def _file_breaks(path: str, old: FileDescriptorProto, new: FileDescriptorProto) -> Iterator[str]:
    yield from _changed(f"file {path}", old, new, package="package", syntax="syntax")
    package = old.package
    yield from _each("message", package, old.message_type, new.message_type, _message_breaks)
    yield from _each("enum", package, old.enum_type, new.enum_type, _enum_breaks)
    yield from _each("service", package, old.service, new.service, _service_breaks)


def _message_breaks(full: str, old: DescriptorProto, new: DescriptorProto) -> Iterator[str]:
    oneofs = [oneof.name for oneof in old.oneof_decl], [oneof.name for oneof in new.oneof_decl]
    by_name = {field.name: field for field in new.field}
    by_number = {field.number: field for field in new.field}
    for field in old.field:
        where = f"field {full}.{field.name} = {field.number}"
        if field.name in by_name:
            yield from _field_breaks(where, field, by_name[field.name], oneofs)
        elif field.number in by_number:
            yield f"{where} was renamed to {by_number[field.number].name}"
        else:
            yield f"{where} was removed"
    yield from _each("message", full, old.nested_type, new.nested_type, _message_breaks)
    yield from _each("enum", full, old.enum_type, new.enum_type, _enum_breaks)


def _field_breaks(
    where: str, old: FieldDescriptorProto, new: FieldDescriptorProto, oneofs: tuple[list[str], list[str]]
) -> Iterator[str]:
    if old.number != new.number:
        yield f"{where} was renumbered to {new.number}"
    if old.type != new.type:
        old_type, new_type = (FieldDescriptorProto.Type.Name(field.type) for field in (old, new))
        yield f"{where} changed its type from {old_type} to {new_type}"
    if old.label != new.label:
        old_label, new_label = (FieldDescriptorProto.Label.Name(field.label) for field in (old, new))
        yield f"{where} changed from {old_label} to {new_label}"
    yield from _changed(
        where, old, new, type_name="message or enum", json_name="JSON name", proto3_optional="presence"
    )
    old_oneof, new_oneof = (
        names[field.oneof_index] if field.HasField("oneof_index") else "no oneof"
        for names, field in zip(oneofs, (old, new), strict=True)
    )
    if old_oneof != new_oneof:
        yield f"{where} moved from {old_oneof} to {new_oneof}"


def _enum_breaks(full: str, old: EnumDescriptorProto, new: EnumDescriptorProto) -> Iterator[str]:
    yield from _each(
        "enum value",
        full,
        old.value,
        new.value,
        lambda where, a, b: _changed(f"enum value {where}", a, b, number="number"),
    )


def _service_breaks(full: str, old: ServiceDescriptorProto, new: ServiceDescriptorProto) -> Iterator[str]:
    words = {
        "input_type": "request",
        "output_type": "reply",
        "client_streaming": "client streaming",
        "server_streaming": "server streaming",
    }
    yield from _each(
        "method", full, old.method, new.method, lambda where, a, b: _changed(f"method {where}", a, b, **words)
    )


def _changed(where: str, old: Any, new: Any, **words: str) -> Iterator[str]:
    """A sentence for every attribute named in `words` (attribute -> the word for it) that differs."""
    for attribute, word in words.items():
        was, is_now = getattr(old, attribute), getattr(new, attribute)
        if was != is_now:
            yield f"{where} changed its {word} from {was!r} to {is_now!r}"


def main(argv: Sequence[str] | None = None) -> int:
    """Check, or write the baseline; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--update", action="store_true", help="write additions into the baseline")
    parser.add_argument(
        "--accept-breaks", action="store_true", help="with --update: write it in spite of breaks"
    )
    args = parser.parse_args(argv)
    try:
        new = descriptor_set(PROTO_ROOT)
    except ProtoError as error:
        print(f"check_proto_compat: {error}", file=sys.stderr)
        return 1
    old = FileDescriptorSet.FromString(BASELINE.read_bytes()) if BASELINE.exists() else FileDescriptorSet()
    found = breaks(old, new)
    for line in found:
        print(f"proto: {line}", file=sys.stderr)
    if args.update and (args.accept_breaks or not found):
        BASELINE.write_bytes(new.SerializeToString(deterministic=True))
        print("wrote proto/baseline.binpb")
        return 0
    if not found and old != new:
        print("proto/baseline.binpb lacks what was added to proto/; run `make proto`", file=sys.stderr)
        return 1
    if not found:
        print("proto: no caller of the baseline breaks")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
