"""What is wrong with settings, in one sentence."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from pydantic import ValidationError

from megamoe.errors import must_be


def perhaps(word: str, known: Iterable[str]) -> str:
    """What a misspelled word may mean."""
    close = difflib.get_close_matches(word, known, n=1)
    return f" (perhaps {close[0]})" if close else ""


def sentence(error: ValidationError, known: Iterable[str]) -> str:
    """pydantic's report as our one-sentence form. known: names of all settings."""
    parts = []
    for item in error.errors(include_url=False):
        field = ".".join(str(part) for part in item["loc"]) or "config"
        if item["type"] == "extra_forbidden":
            wanted = "a known setting" + perhaps(field, known)
            parts.append(must_be(field, wanted, repr(item["input"])))
        else:
            rule = re.sub(r"^\w+ should ", "must ", item["msg"])
            parts.append(f"{field} {rule}, got {item['input']!r}")
    return "; ".join(parts)
