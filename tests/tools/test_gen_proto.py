"""Stubs are generated with imports that work as `service.pb`, and every kind of drift is noticed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools import gen_proto

MOE = """syntax = "proto3";
package megamoe.v1;
import "megamoe/v1/shared.proto";
import "google/protobuf/empty.proto";
message Call { Shared shared = 1; bytes payload = 15; }
service Layer { rpc Go(stream Call) returns (stream Call); rpc Stop(google.protobuf.Empty) returns (Call); }
"""
SHARED = 'syntax = "proto3";\npackage megamoe.v1;\nmessage Shared { string name = 1; }\n'


@pytest.fixture
def proto_root(tmp_path: Path) -> Path:
    folder = tmp_path / "proto" / "megamoe" / "v1"
    folder.mkdir(parents=True)
    (folder / "moe.proto").write_text(MOE)
    (folder / "shared.proto").write_text(SHARED)
    return tmp_path / "proto"


def test_stubs_import_as_service_pb_and_keep_the_wire_names(proto_root: Path, tmp_path: Path) -> None:
    package = tmp_path / "fresh" / "service"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    gen_proto.write(gen_proto.generate(proto_root), package / "pb")
    script = (
        "from service.pb import moe_pb2, moe_pb2_grpc, shared_pb2\n"
        "import pickle, sys\n"
        "call = moe_pb2.Call(shared=shared_pb2.Shared(name='x'), payload=b'1')\n"
        "assert moe_pb2.Call.FromString(call.SerializeToString()) == call\n"
        "assert pickle.loads(pickle.dumps(call)) == call\n"
        "assert moe_pb2.DESCRIPTOR.name == 'megamoe/v1/moe.proto'\n"
        "assert moe_pb2.Call.DESCRIPTOR.full_name == 'megamoe.v1.Call'\n"
        "assert 'megamoe' not in sys.modules\n"
        "print(moe_pb2_grpc.LayerStub.__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=package.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "LayerStub"


def test_type_stubs_come_along(proto_root: Path) -> None:
    stubs = gen_proto.generate(proto_root)
    assert {"moe_pb2.pyi", "moe_pb2_grpc.pyi", "shared_pb2.pyi"} <= set(stubs)
    assert not any("from megamoe" in text for text in stubs.values())


def test_fresh_stubs_show_no_difference(proto_root: Path, tmp_path: Path) -> None:
    stubs = gen_proto.generate(proto_root)
    gen_proto.write(stubs, tmp_path / "pb")
    assert gen_proto.differences(stubs, tmp_path / "pb") == []


def test_every_drift_is_named(proto_root: Path, tmp_path: Path) -> None:
    stubs = gen_proto.generate(proto_root)
    folder = tmp_path / "pb"
    gen_proto.write(stubs, folder)
    (folder / "moe_pb2.py").write_text(stubs["moe_pb2.py"] + "# edited by hand\n")
    (folder / "shared_pb2.pyi").unlink()
    (folder / "old_pb2.py").write_text("")
    assert gen_proto.differences(stubs, folder) == [
        "moe_pb2.py: stale",
        "old_pb2.py: left over",
        "shared_pb2.pyi: missing",
    ]
    gen_proto.write(stubs, folder)
    assert gen_proto.differences(stubs, folder) == []


def test_a_proto_that_does_not_compile_or_stands_elsewhere_is_refused(proto_root: Path) -> None:
    (proto_root / "megamoe" / "v1" / "moe.proto").write_text(MOE.replace("Shared shared", "Nobody shared"))
    with pytest.raises(gen_proto.ProtoError, match="exit status"):
        gen_proto.generate(proto_root)
    (proto_root / "stray.proto").write_text(SHARED)
    with pytest.raises(gen_proto.ProtoError, match="must stand in megamoe/v1/"):
        gen_proto.generate(proto_root)


def test_no_proto_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(gen_proto.ProtoError, match="at least one"):
        gen_proto.generate(tmp_path)
