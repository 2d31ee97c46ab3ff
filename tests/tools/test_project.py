"""The project's own files agree with each other: pins, floors, folders, and who loads what at start."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints" / "cpu.txt").read_text(), re.MULTILINE))


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(*extras: str) -> list[Requirement]:
    texts = list(PROJECT["project"]["dependencies"])
    for extra in extras:
        texts += PROJECT["project"]["optional-dependencies"][extra]
    return [Requirement(text) for text in texts]


def test_every_direct_dependency_is_pinned_within_its_range() -> None:
    pins = {normal(name): version for name, version in PINS.items()}
    for requirement in requirements("dev"):
        assert normal(requirement.name) in pins
        assert requirement.specifier.contains(pins[normal(requirement.name)]), str(requirement)


def test_every_transitive_dependency_is_pinned() -> None:
    """What the installed packages need on this machine is in the pins, so two installations are the same."""
    pinned = {normal(name) for name in PINS}
    needs = {normal(dist.name): dist.requires or [] for dist in distributions() if dist.name}
    todo, seen = [normal(requirement.name) for requirement in requirements("dev")], set()
    while todo:
        name = todo.pop()
        if name in seen or name not in needs:
            continue
        seen.add(name)
        for text in needs[name]:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.append(normal(requirement.name))
    assert len(seen) > 30
    assert seen <= pinned


def test_the_stubs_run_with_the_lowest_versions_allowed() -> None:
    floors = {
        r.name: min(s.version for s in r.specifier if s.operator == ">=")
        for r in requirements()
        if r.specifier
    }
    messages = (ROOT / "service" / "pb" / "moe_pb2.py").read_text()
    wanted = re.search(r"# Protobuf Python Version: (\S+)", messages)
    services = (ROOT / "service" / "pb" / "moe_pb2_grpc.py").read_text()
    wanted_grpc = re.search(r"GRPC_GENERATED_VERSION = '(\S+)'", services)
    assert wanted
    assert wanted_grpc
    assert Version(floors["protobuf"]) >= Version(wanted[1])
    assert Version(floors["grpcio"]) >= Version(wanted_grpc[1])


def test_gpu_extras_name_what_they_need() -> None:
    gfx950 = {requirement.name: requirement for requirement in requirements("gfx950")}
    assert str(gfx950["flydsl"].specifier) == "==0.5.0"
    marker = gfx950["amd-mori"].marker
    assert marker is not None
    environment = {"platform_python_implementation": "CPython"}
    assert [
        v for v in ("3.10", "3.11", "3.12", "3.13") if marker.evaluate(environment | {"python_version": v})
    ] == [
        "3.10",
        "3.12",
    ]


def test_no_test_is_skipped_or_expected_to_fail() -> None:
    switched_off = re.compile(
        r"pytest\.(skip|importorskip|xfail)\b|mark\.(skip|skipif|xfail)\b|unittest\.skip"
    )
    found = [
        path.relative_to(ROOT)
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if path != Path(__file__) and switched_off.search(path.read_text())
    ]
    assert found == []


def test_the_map_names_every_room() -> None:
    """CONTRIBUTING.md tells where everything lives: a module that is not in it is a wall moved in secret."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rooms = [
        path
        for package in ("megamoe", "service", "loadgen", "tools")
        for path in sorted((ROOT / package).iterdir())
        if path.name not in ("__init__.py", "__pycache__", "py.typed")
    ]
    named = set(re.findall(r"\w+(?:\.py|\.sh|/)", text))
    (tools,) = re.findall(r"^tools/ +(.*);", text, re.MULTILINE)
    named |= {f"{name}.py" for name in tools.split(", ")}
    missing = [
        str(path.relative_to(ROOT))
        for path in rooms
        if (f"{path.name}/" if path.is_dir() else path.name) not in named and not path.name.startswith("cli_")
    ]
    assert missing == [], "add a line to the map in CONTRIBUTING.md"
