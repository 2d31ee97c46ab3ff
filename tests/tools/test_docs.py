"""What the documentation points to exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@cache
def names_in(file: Path) -> frozenset[str]:
    return frozenset(
        node.name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    )


def exists(reference: str) -> bool:
    """Whether `folder/test_file.py::test_name`, below tests/, is a test."""
    file, _, name = reference.partition("::")
    path = ROOT / "tests" / file
    return path.is_file() and name in names_in(path)


def test_every_fault_names_tests_that_exist() -> None:
    rows = [
        line.split("|")
        for line in (ROOT / "docs" / "faults.md").read_text().splitlines()
        if line.startswith("| ") and not line.startswith("| fault")
    ]
    assert len(rows) > 20
    for _, fault, _, tests, _ in rows:
        references = re.findall(r"`([^`]*)`", tests)
        assert references, fault
        assert [name for name in references if not exists(name)] == [], fault
    assert not exists("tools/test_docs.py::test_that_nobody_wrote")
    assert not exists("tools/test_nothing.py::test_every_fault_names_tests_that_exist")


def test_links_between_documents_lead_somewhere() -> None:
    broken = [
        f"{page.name}: {target}"
        for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "deploy").rglob("*.md")]
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert broken == []
