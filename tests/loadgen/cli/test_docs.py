"""The commands in docs/agentx.md exist, with these options."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from typer.testing import CliRunner

from loadgen.cli.main import app

DOCUMENT = Path(__file__).parents[3] / "docs" / "agentx.md"


def is_known(words: list[str]) -> bool:
    """With --help nothing is run, but the options before it are looked up."""
    return CliRunner().invoke(app, [*words, "--help"]).exit_code == 0


def test_every_command_in_the_document_can_be_typed() -> None:
    blocks = re.findall(r"^```\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    lines = re.findall(r"^ *loadgen (.*)$", "\n".join(blocks), re.MULTILINE)
    found = [shlex.split(line.removesuffix("\\"), comments=True) for line in lines]
    assert {words[0] for words in found} >= {"synth", "stats", "compare", "page", "calibrate", "published"}
    assert [words for words in found if not is_known(words)] == []
    assert not is_known(["compare", "--colour", "red"])
