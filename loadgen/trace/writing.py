"""Writes trace files in the recorded format; `file` reads them. What prompts repeat of each other is made once."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from loadgen.trace.file import MAX_OPEN_CHAINS
from loadgen.trace.schema import trace_to_record
from loadgen.trace.trace import HashIds, Trace

_PLACE = re.compile(r'"hash_ids":(\d+)')


def write_traces(path: Path, traces: Iterable[Trace]) -> int:
    """Write sessions as JSON Lines; returns how many."""
    count = 0
    with path.open("wb") as out:
        for trace in traces:
            _write(out, trace)
            out.write(b"\n")
            count += 1
    return count


def write_trace_folder(folder: Path, traces: Iterable[Trace]) -> int:
    """Write one .json file a session, as the public harness reads recorded traces; returns how many."""
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    for trace in traces:
        with (folder / f"{trace.id}.json").open("wb") as out:
            _write(out, trace)
        count += 1
    return count


def _write(out: BinaryIO, trace: Trace) -> None:
    record, hash_lists = trace_to_record(trace)
    skeleton = json.dumps(record, separators=(",", ":"))
    texts = _Texts(hash_lists)
    written = 0
    # Only fields of requests match: in a string the quotes would be escaped.
    for match in _PLACE.finditer(skeleton):
        out.write(skeleton[written : match.start()].encode() + b'"hash_ids":[')
        out.write(texts.of(int(match[1])))
        out.write(b"]")
        written = match.end()
    out.write(skeleton[written:].encode())


class _Texts:
    """Texts of hash lists, asked for in order; a list that extends an earlier one repeats its text."""

    def __init__(self, hash_lists: Sequence[HashIds]) -> None:
        self._lists = hash_lists
        self._open: list[tuple[HashIds, bytes]] = []

    def of(self, place: int) -> bytes:
        ids = self._lists[place]
        text = b""
        for idx in range(len(self._open) - 1, -1, -1):
            known, known_text = self._open[idx]
            if 0 < len(known) <= len(ids) and np.array_equal(ids[: len(known)], known):
                text = known_text
                ids = ids[len(known) :]
                del self._open[idx]
                break
        rest = ",".join(map(str, ids.tolist())).encode()
        text = text + b"," + rest if text and rest else text or rest
        self._open.append((self._lists[place], text))
        del self._open[:-MAX_OPEN_CHAINS]
        return text
