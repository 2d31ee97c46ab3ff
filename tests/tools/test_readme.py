"""README.md tells today's settings and metrics."""

from __future__ import annotations

import pytest

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
