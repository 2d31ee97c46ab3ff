"""README.md tells today's settings and metrics, and what it says to type can be typed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

import loadgen.cli
import service.cli
from service.config import load_config
from tools import readme_tables


def test_tables_are_fresh() -> None:
    text = readme_tables.README.read_text()
    assert readme_tables.refreshed(text) == text, "run `python tools/readme_tables.py`"


def test_a_stale_or_missing_table_is_seen() -> None:
    text = readme_tables.README.read_text()
    stale = text.replace("| `fixed_slot_max` |", "| `fixed_slots` |")
    assert stale != text
    assert readme_tables.refreshed(stale) == text
    with pytest.raises(ValueError, match="one metrics table"):
        readme_tables.refreshed(text.replace("<!-- end metrics -->", ""))


def commands() -> list[list[str]]:
    """Every `megamoe` and `loadgen` command line in the README, in blocks and in running text."""
    text = readme_tables.README.read_text()
    lines = re.findall(r"^((?:megamoe|loadgen) .*)$", text, re.MULTILINE) + re.findall(
        r"`((?:megamoe|loadgen) -?[^`|]*)`", text
    )
    return [shlex.split(line, comments=True) for line in lines]


def is_known(words: list[str]) -> bool:
    """Whether command and options exist; with --help nothing is run."""
    app = {"megamoe": service.cli.app, "loadgen": loadgen.cli.app}[words[0]]
    return CliRunner().invoke(app, [*words[1:], "--help"]).exit_code == 0


def test_every_command_in_the_readme_can_be_typed() -> None:
    found = commands()
    assert {words[1] for words in found if words[0] == "megamoe"} >= {"serve", "plan", "doctor", "bench"}
    assert any(words[0] == "loadgen" for words in found)
    assert [words for words in found if not is_known(words)] == []
    assert not is_known(["megamoe", "serve", "--colour", "red"])
    assert not is_known(["megamoe", "dance"])


def test_the_settings_files_in_the_readme_are_taken(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", readme_tables.README.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        file = tmp_path / "service.yaml"
        file.write_text(block)
        load_config(file, env=False)
