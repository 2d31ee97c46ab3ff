"""Write the Python stubs of `proto/` into `service/pb`, or check that they are what `proto/` says.

Owns: every file in `service/pb`. Refuses: a proto outside package `megamoe.v1`.
The proto package is `megamoe.v1`, but the Python package `megamoe` is the runtime library, which must not know of
protobuf; so the stubs are imported as `service.pb.moe_pb2`, while descriptors keep the wire's own names and file paths.

    python tools/gen_proto.py            write
    python tools/gen_proto.py --check    exit 1 when a stub is stale, missing or left over
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTO_ROOT = ROOT / "proto"
STUBS = ROOT / "service" / "pb"
PROTO_PACKAGE = "megamoe.v1"
STUB_PACKAGE = "service.pb"
INIT = '"""Generated stubs of proto/megamoe/v1; `make proto` writes them. Never edit them by hand."""\n'


class ProtoError(Exception):
    """The .proto files do not compile, or do not stand where this tool expects them."""


def proto_files(proto_root: Path) -> list[str]:
    """Every .proto below `proto_root`, as a path relative to it, sorted."""
    files = sorted(path.relative_to(proto_root).as_posix() for path in proto_root.rglob("*.proto"))
    folder = PROTO_PACKAGE.replace(".", "/")
    if not files:
        raise ProtoError(f"{proto_root} must hold at least one .proto, got none")
    for name in files:
        if Path(name).parent.as_posix() != folder:
            raise ProtoError(f"{name} must stand in {folder}/")
    return files


def run_protoc(proto_root: Path, *options: str) -> None:
    """Run the bundled protoc over all of `proto_root`. Raises ProtoError; protoc's own words go to stderr."""
    well_known = resources.files("grpc_tools") / "_proto"
    plugins = [
        f"--plugin=protoc-gen-{name}={Path(sys.executable).parent / f'protoc-gen-{name}'}"
        for name in ("mypy", "mypy_grpc")
    ]
    code = protoc.main(
        ["protoc", f"-I{proto_root}", f"-I{well_known}", *plugins, *options, *proto_files(proto_root)]
    )
    if code != 0:
        raise ProtoError(f"protoc failed with exit status {code}")


def descriptor_set(proto_root: Path) -> FileDescriptorSet:
    """What `proto_root` says, without comments and without the well-known types it imports."""
    with tempfile.TemporaryDirectory() as temp:
        out = Path(temp) / "set.binpb"
        run_protoc(proto_root, f"--descriptor_set_out={out}")
        return FileDescriptorSet.FromString(out.read_bytes())


def generate(proto_root: Path) -> dict[str, str]:
    """File name -> text of every stub, with imports that work inside `service.pb`."""
    with tempfile.TemporaryDirectory() as temp:
        run_protoc(
            proto_root,
            f"--python_out={temp}",
            f"--grpc_python_out={temp}",
            f"--mypy_out=quiet:{temp}",
            f"--mypy_grpc_out=quiet:{temp}",
        )
        folder = Path(temp) / PROTO_PACKAGE.replace(".", "/")
        stubs = {path.name: _as_stub_package(path.read_text()) for path in sorted(folder.iterdir())}
    return {"__init__.py": INIT, **stubs}


def _as_stub_package(text: str) -> str:
    """Point Python imports and module names at `service.pb`; wire names ('/megamoe.v1.X/...') stay."""
    package = re.escape(PROTO_PACKAGE)
    text = re.sub(rf"^from {package} import", f"from {STUB_PACKAGE} import", text, flags=re.MULTILINE)
    return re.sub(rf"\b{package}\.(\w+_pb2)", rf"{STUB_PACKAGE}.\1", text)


def differences(wanted: dict[str, str], folder: Path) -> list[str]:
    """One sentence for each stub that is stale, missing or left over in `folder`."""
    found = {p.name: p.read_text() for p in folder.glob("*") if p.suffix in (".py", ".pyi")}
    return [
        f"{name}: {'missing' if name not in found else 'left over' if name not in wanted else 'stale'}"
        for name in sorted(wanted.keys() | found.keys())
        if wanted.get(name) != found.get(name)
    ]


def write(stubs: dict[str, str], folder: Path) -> None:
    """Make `folder` hold exactly `stubs`."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*"):
        if old.suffix in (".py", ".pyi") and old.name not in stubs:
            old.unlink()
    for name, text in stubs.items():
        (folder / name).write_text(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 when a stub differs")
    args = parser.parse_args(argv)
    try:
        stubs = generate(PROTO_ROOT)
    except ProtoError as error:
        print(f"gen_proto: {error}", file=sys.stderr)
        return 1
    if not args.check:
        write(stubs, STUBS)
        print(f"wrote {len(stubs)} files into service/pb")
        return 0
    wrong = differences(stubs, STUBS)
    for line in wrong:
        print(f"service/pb/{line}; run `make proto`", file=sys.stderr)
    if not wrong:
        print(f"service/pb: {len(stubs)} files are what proto/ says")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
