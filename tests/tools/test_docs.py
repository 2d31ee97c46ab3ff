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


def leads_somewhere(page: Path, target: str) -> bool:
    """Whether a link's file exists and, where it names a section of a document, has a heading of that name."""
    file, _, section = target.partition("#")
    path = page.parent / file if file else page
    if not section or path.suffix != ".md":
        return path.exists()
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE) if path.exists() else []
    return section in [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_links_between_documents_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "deploy").rglob("*.md")]
    links = [(page, target) for page in pages for target in re.findall(r"\]\(([^):\s]+)\)", page.read_text())]
    assert len(links) > 10
    broken = [f"{page.name}: {target}" for page, target in links if not leads_somewhere(page, target)]
    assert broken == []
    assert leads_somewhere(ROOT / "docs" / "hopper.md", "hopper-versions.md#co-located-callers")
    assert not leads_somewhere(ROOT / "docs" / "hopper.md", "hopper-versions.md#nothing-of-the-kind")
    assert not leads_somewhere(ROOT / "docs" / "hopper.md", "no-such-page.md")
