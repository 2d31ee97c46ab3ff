"""Images cannot be built here, so the Dockerfiles are linted by hadolint and held to the rules that matter to us."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.queries import DEPLOY

ROOT = DEPLOY.parent
DOCKERFILES = sorted((DEPLOY / "docker").glob("Dockerfile.*"))


def instructions(path: Path) -> list[tuple[str, str]]:
    """(instruction, arguments), continuation lines joined, comments left out."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [
        (line.split()[0].upper(), line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()
    ]


def last_stage(path: Path) -> list[tuple[str, str]]:
    found = instructions(path)
    start = max(idx for idx, (name, _) in enumerate(found) if name == "FROM")
    return found[start:]


def test_one_for_each_kind_of_machine() -> None:
    assert [path.suffix for path in DOCKERFILES] == [".cpu", ".cuda", ".rocm"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run(
        [hadolint, "--failure-threshold", "info", path],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_hadolint_would_find_something(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM debian:latest\nRUN cd /tmp\n")
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run(
        [hadolint, tmp_path / "Dockerfile"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert "DL3007" in done.stdout


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_bases_are_pinned_and_the_build_stays_behind(path: Path) -> None:
    froms = [arguments for name, arguments in instructions(path) if name == "FROM"]
    assert len(froms) >= 2
    stages = {arguments.split()[-1] for arguments in froms if " AS " in arguments}
    for arguments in froms:
        base = arguments.split()[0]
        if base not in stages:
            assert re.search(r":\d+\.\d+", base), f"{base} must name a version"
    assert not any(name == "RUN" and "pip install" in arguments for name, arguments in last_stage(path))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_runs_as_nobody_special_with_a_health_check(path: Path) -> None:
    final = last_stage(path)
    users = [arguments for name, arguments in final if name == "USER"]
    assert users, "the final stage must set a USER"
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1]), (
        "by number, so that Kubernetes can tell it is not root"
    )
    health = [arguments for name, arguments in final if name == "HEALTHCHECK"]
    assert len(health) == 1
    assert "/readyz" in health[0]
    assert [arguments for name, arguments in final if name == "CMD"] == ['["megamoe", "serve"]']


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_what_it_copies_is_in_the_build_context(path: Path) -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for name, arguments in instructions(path):
        if name == "COPY" and "--from" not in arguments:
            for source in arguments.split()[:-1]:
                assert (ROOT / source).exists()
                assert source.split("/")[0] in kept
