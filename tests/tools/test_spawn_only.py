"""No process of this product is forked: a forked child of a process with live gRPC threads hangs or corrupts.

Children are other programs (subprocess) or fresh interpreters (multiprocessing's spawn).
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FORKS = {"fork", "forkpty", "preexec_fn", "set_start_method", "Pool"}


def called(node: ast.Call) -> str:
    """The last name of what is called."""
    return str(getattr(node.func, "attr", getattr(node.func, "id", "")))


def forks(source: str) -> list[str]:
    """What in a module could fork, as "line: what"."""
    found = []
    for node in ast.walk(ast.parse(source)):
        name = ""
        if isinstance(node, ast.Attribute):
            name = node.attr
            if name == "Process" and isinstance(node.value, ast.Name) and node.value.id == "multiprocessing":
                found.append(f"{node.lineno}: multiprocessing.Process")
        elif isinstance(node, ast.keyword):
            name = node.arg or ""
        elif isinstance(node, ast.alias):
            name = node.name
        if name in FORKS:
            found.append(f"{getattr(node, 'lineno', 0)}: {name}")
        if not isinstance(node, ast.Call):
            continue
        if called(node) == "ProcessPoolExecutor" and "mp_context" not in {k.arg for k in node.keywords}:
            found.append(f"{node.lineno}: ProcessPoolExecutor without mp_context")
        if called(node) == "get_context":
            methods = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            if methods != ["spawn"]:
                found.append(f"{node.lineno}: get_context{tuple(methods)}")
    return found


@pytest.mark.parametrize("package", ["megamoe", "service", "loadgen"])
def test_nothing_forks(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    found = {str(path.relative_to(ROOT)): forks(path.read_text()) for path in files}
    assert {path: where for path, where in found.items() if where} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.fork()",
        "from os import fork",
        "subprocess.Popen(['a'], preexec_fn=f)",
        "multiprocessing.get_context('fork')",
        "multiprocessing.get_context()",
        "multiprocessing.Process(target=f)",
        "from multiprocessing import Pool",
        "concurrent.futures.ProcessPoolExecutor()",
        "from concurrent.futures import ProcessPoolExecutor\nProcessPoolExecutor(2)",
        "ProcessPoolExecutor(mp_context=multiprocessing.get_context('forkserver'))",
    ],
)
def test_the_check_objects(source: str) -> None:
    assert forks(source)


def test_the_check_permits_what_is_safe() -> None:
    assert not forks("c = multiprocessing.get_context('spawn')\nc.Process(target=f)\nsubprocess.Popen(['a'])")
    assert not forks("ProcessPoolExecutor(2, mp_context=multiprocessing.get_context('spawn'))")
