"""The import contracts hold for the code as it is, and each of them objects to what it forbids."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("megamoe", "service", "loadgen")

# contract -> (file to add or append to, the forbidden import)
VIOLATIONS = {
    "Rooms of the house": ("megamoe/shape.py", "import service.config"),
    "megamoe knows nothing of gRPC": ("megamoe/step.py", "import grpc"),
    "service enters megamoe by its door": ("service/config/settings.py", "import megamoe.bundle"),
    "loadgen enters megamoe by its door": ("loadgen/cli/added.py", "import megamoe.bundle"),
    "loadgen enters service by its client": ("loadgen/cli/added.py", "import service.config"),
    "only service.metrics writes metrics": ("service/config/settings.py", "import prometheus_client"),
    "only the launcher knows Ray": ("service/net/wire.py", "import ray"),
    "Triton, FlyDSL and MORI stay": ("megamoe/step.py", "import triton"),
    "Backends never import each other": ("megamoe/backends/added_a.py", "import megamoe.backends.added_b"),
    "Inside megamoe": ("megamoe/errors.py", "import megamoe.step"),
    "Inside loadgen": ("loadgen/tier/router.py", "import loadgen.replay.replay"),
    "Inside service": ("service/ring/layout.py", "import service.rank.step_loop"),
    "only self-checks import the oracle": ("megamoe/weights.py", "import megamoe.reference"),
}


def lint(folder: Path) -> dict[str, str]:
    """Contract -> KEPT or BROKEN, for the packages in `folder`."""
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(folder), "COLUMNS": "300"},
    )
    found = dict(re.findall(r"^(.+?) (KEPT|BROKEN)\b", done.stdout, re.MULTILINE))
    assert found, done.stdout + done.stderr
    return found


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What import-linter says of a copy in which every contract is violated once."""
    folder = tmp_path_factory.mktemp("house")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "megamoe/backends/added_b.py").write_text("")
    for name, line in VIOLATIONS.values():
        with (folder / name).open("a") as file:
            file.write(f"\n{line}\n")
    return lint(folder)


@pytest.mark.parametrize("contract", VIOLATIONS)
def test_each_contract_objects(contract: str, verdicts: dict[str, str]) -> None:
    (name,) = [name for name in verdicts if name.startswith(contract)]
    assert verdicts[name] == "BROKEN"


def test_every_contract_has_a_violation_here(verdicts: dict[str, str]) -> None:
    assert len(verdicts) == len(VIOLATIONS)


def test_importing_the_doors_loads_no_oracle_and_no_accelerator_library() -> None:
    code = (
        "import sys, megamoe, service.config, service.client\n"
        "heavy = {'megamoe.reference', 'triton', 'flydsl', 'mori', 'ray', 'prometheus_client'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
