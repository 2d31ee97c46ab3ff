"""Each way to break a caller is caught, with the name of what broke; additions are not breaks."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from tools import check_proto_compat
from tools.check_proto_compat import breaks
from tools.gen_proto import descriptor_set

BASE = """syntax = "proto3";
package megamoe.v1;
message Call {
  int32 layer_idx = 1;
  repeated int32 counts = 2;
  Path path = 3;
  oneof body { string text = 4; bytes blob = 5; }
  optional uint64 sequence = 6;
  message Inner { float weight = 1; }
  Inner inner = 7;
}
message Reply { bytes payload = 15; }
enum Path { PATH_UNSPECIFIED = 0; PATH_COMPACT = 1; PATH_LARGE_M = 2; }
service MoELayer {
  rpc Forward(stream Call) returns (stream Reply);
  rpc GetInfo(Call) returns (Reply);
}
service Admin { rpc Drain(Call) returns (Reply); }
"""


def compiled(folder: Path, text: str) -> FileDescriptorSet:
    path = folder / "megamoe" / "v1" / "moe.proto"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return descriptor_set(folder)


BREAKS = {
    "field removed": ("  int32 layer_idx = 1;\n", "", "field megamoe.v1.Call.layer_idx = 1 was removed"),
    "field removed though reserved": (
        "  int32 layer_idx = 1;\n",
        '  reserved 1; reserved "layer_idx";\n',
        "field megamoe.v1.Call.layer_idx = 1 was removed",
    ),
    "field renumbered": ("layer_idx = 1", "layer_idx = 9", "layer_idx = 1 was renumbered to 9"),
    "field renamed": ("layer_idx = 1", "layer = 1", "layer_idx = 1 was renamed to layer"),
    "field retyped": ("int32 layer_idx", "int64 layer_idx", "from TYPE_INT32 to TYPE_INT64"),
    "field to another message": ("  Inner inner = 7", "  Reply inner = 7", "changed its message or enum"),
    "repeated became single": (
        "repeated int32 counts",
        "int32 counts",
        "from LABEL_REPEATED to LABEL_OPTIONAL",
    ),
    "presence lost": ("optional uint64", "uint64", "changed its presence"),
    "field left its oneof": (
        "oneof body { string text = 4; bytes blob = 5; }",
        "oneof body { bytes blob = 5; } string text = 4;",
        "text = 4 moved from body to no oneof",
    ),
    "JSON name changed": ("layer_idx = 1", 'layer_idx = 1 [json_name = "l"]', "changed its JSON name"),
    "nested field retyped": ("float weight", "double weight", "megamoe.v1.Call.Inner.weight"),
    "message removed": (
        "message Reply { bytes payload = 15; }",
        "message Answer { bytes payload = 15; }",
        "message megamoe.v1.Reply was removed or renamed",
    ),
    "enum value removed": ("PATH_COMPACT = 1; ", "", "enum value megamoe.v1.Path.PATH_COMPACT was removed"),
    "enum value renumbered": ("PATH_COMPACT = 1", "PATH_COMPACT = 5", "changed its number from 1 to 5"),
    "method removed": ("  rpc GetInfo(Call) returns (Reply);\n", "", "method megamoe.v1.MoELayer.GetInfo"),
    "client streaming lost": ("Forward(stream Call)", "Forward(Call)", "changed its client streaming"),
    "server streaming lost": ("returns (stream Reply)", "returns (Reply)", "changed its server streaming"),
    "server streaming gained": (
        "GetInfo(Call) returns (Reply)",
        "GetInfo(Call) returns (stream Reply)",
        "changed its server streaming",
    ),
    "request type changed": ("GetInfo(Call)", "GetInfo(Reply)", "changed its request"),
    "reply type changed": ("Drain(Call) returns (Reply)", "Drain(Call) returns (Call)", "changed its reply"),
    "service removed": (
        "service Admin { rpc Drain(Call) returns (Reply); }\n",
        "",
        "service megamoe.v1.Admin",
    ),
    "package changed": ("package megamoe.v1;", "package megamoe.v2;", "changed its package"),
}


@pytest.mark.parametrize("case", BREAKS)
def test_each_kind_of_break_is_caught(case: str, tmp_path: Path) -> None:
    old_text, new_text, sentence = BREAKS[case]
    text = BASE.replace(old_text, new_text)
    if case == "message removed":
        text = text.replace("(Reply)", "(Answer)").replace("stream Reply", "stream Answer")
    assert text != BASE
    found = breaks(compiled(tmp_path / "old", BASE), compiled(tmp_path / "new", text))
    assert any(sentence in line for line in found), found


def test_additions_break_nobody(tmp_path: Path) -> None:
    text = (
        BASE.replace("  Inner inner = 7;", "  Inner inner = 7; string trace = 8; reserved 9;")
        .replace("PATH_LARGE_M = 2;", "PATH_LARGE_M = 2; PATH_SMALL_M = 3;")
        .replace("rpc GetInfo", "rpc Ping(Call) returns (Reply); rpc GetInfo")
    )
    text += "message More { int32 x = 1; }\nservice Extra { rpc Do(More) returns (More); }\n"
    assert breaks(compiled(tmp_path / "old", BASE), compiled(tmp_path / "new", text)) == []


def test_a_removed_file_is_a_break(tmp_path: Path) -> None:
    assert breaks(compiled(tmp_path, BASE), FileDescriptorSet()) == [
        "file megamoe/v1/moe.proto was removed or renamed"
    ]


def test_command_protects_additions_and_refuses_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_proto_compat, "PROTO_ROOT", tmp_path)
    monkeypatch.setattr(check_proto_compat, "BASELINE", tmp_path / "baseline.binpb")
    compiled(tmp_path, BASE)
    assert check_proto_compat.main([]) == 1, "nothing is protected without a baseline"
    assert check_proto_compat.main(["--update"]) == 0
    assert check_proto_compat.main([]) == 0
    compiled(tmp_path, BASE.replace("  Inner inner = 7;", "  Inner inner = 7; string trace = 8;"))
    assert check_proto_compat.main([]) == 1, "an addition has to enter the baseline"
    assert check_proto_compat.main(["--update"]) == 0
    compiled(tmp_path, BASE)
    capsys.readouterr()
    assert check_proto_compat.main([]) == 1
    assert "field megamoe.v1.Call.trace = 8 was removed" in capsys.readouterr().err
    assert check_proto_compat.main(["--update"]) == 1, "a break is never written without being accepted"
    assert check_proto_compat.main(["--update", "--accept-breaks"]) == 0
    assert check_proto_compat.main([]) == 0
