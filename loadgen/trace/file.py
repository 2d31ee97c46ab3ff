"""Trace files: one session a line, JSON, in the format in which AgentX sessions are recorded.

Files are larger than memory: one session is held at a time, and of prompts that extend each other only the longest,
with the others as views of it. That is also what makes them fast to read and write: a prompt repeats nearly all of
the one before, and only what is new is parsed. `schema` holds the fields.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from loadgen.trace.schema import AS_RECORDED, shown, trace_from_record
from loadgen.trace.trace import HashIds, Trace
from megamoe.errors import InvalidArgumentError, must_be

MAX_OPEN_CHAINS = 16
"""Prompts that a next one may extend: the main agent's and those of sub-agents recorded between two of its turns."""

MAX_LINE_BYTES = 1 << 30
"""Several times the longest session that fits the recorded format's contexts; a longer line is no session."""

# A quote inside a JSON string is escaped, so the name in quotes before a colon and a list is always a field.
_HASH_IDS = re.compile(rb'(?<!\\)"hash_ids"\s*:(?:\s*\[([^\[\]{}"]*)\])?')


@dataclass(slots=True, eq=False)
class _Chain:
    """Prompts that extend each other: the text of the longest, its parsed pieces, and (place, length) of each."""

    text: bytes
    pieces: list[HashIds]
    length: int
    members: list[tuple[int, int]] = field(default_factory=list)

    def extended_by(self, text: bytes) -> bool:
        size = len(self.text)
        return (
            size > 0 and text.startswith(self.text) and (len(text) == size or text[size : size + 1] in b", ")
        )

    def extend(self, place: int, text: bytes) -> None:
        rest = text[len(self.text) :].lstrip(b", \t")
        if rest:
            self.pieces.append(_integers(rest))
            self.length += len(self.pieces[-1])
        self.text = text
        self.members.append((place, self.length))


def _integers(text: bytes) -> HashIds:
    """Raises ValueError for anything but whole numbers of 64 bits with commas between them."""
    values = np.asarray(json.loads(b"[" + text + b"]"))
    if len(values) and values.dtype.kind not in "iu":
        raise ValueError(f"{values.dtype} values")
    return values.astype(np.int64, casting="safe" if values.dtype.kind == "i" else "same_kind")


def _without_hash_lists(line: bytes) -> tuple[bytes, list[HashIds]]:
    """The line with each list of hash_ids replaced by its place among the lists, and the lists."""
    chains: list[_Chain] = []
    closed: list[_Chain] = []
    count = 0

    def place_of(match: re.Match[bytes]) -> bytes:
        nonlocal count
        if match[1] is None:
            return b'"hash_ids":null,"%s":' % AS_RECORDED.encode()  # no list: refused with what is there
        text, place = match[1].strip(), count
        count += 1
        for idx in range(len(chains) - 1, -1, -1):
            if chains[idx].extended_by(text):
                chains.append(chains.pop(idx))
                break
        else:
            chains.append(_Chain(b"", [], 0))
            if len(chains) > MAX_OPEN_CHAINS:
                closed.append(chains.pop(0))
        chains[-1].extend(place, text)
        return b'"hash_ids":%d' % place

    skeleton = _HASH_IDS.sub(place_of, line)
    hash_lists: list[HashIds] = [np.empty(0, np.int64)] * count
    for chain in (*closed, *chains):
        longest = np.concatenate([np.empty(0, np.int64), *chain.pieces])
        for place, length in chain.members:
            hash_lists[place] = longest[:length]
    return skeleton, hash_lists


def parse_trace(line: bytes, where: str) -> Trace:
    """The session on one line. Raises InvalidArgumentError naming `where` and the field."""
    try:
        skeleton, hash_lists = _without_hash_lists(line)
    except (ValueError, OverflowError) as error:
        raise InvalidArgumentError(must_be(f"{where}: hash_ids", "lists of whole numbers", error)) from None
    try:
        record = json.loads(skeleton.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(
            f"{where}: line must be text in UTF-8, not compressed, got {error}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{where}: line must be a JSON object, got {error}") from None
    return trace_from_record(record, hash_lists, where)


def read_traces(path: Path) -> Iterator[Trace]:
    """The sessions of a JSON Lines file, or of a folder of .json files in order of their names, one at a time.

    Raises InvalidArgumentError naming file, line and field, also for an id that comes twice.
    """
    return (trace for _, trace in _located(path))


class _Part(NamedTuple):
    """Where a session lies: size bytes from offset; `where` says it in words."""

    path: Path
    offset: int
    size: int
    where: str


def _located(path: Path) -> Iterator[tuple[_Part, Trace]]:
    seen: dict[str, str] = {}
    for part, line in _texts(path):
        trace = parse_trace(line, part.where)
        if trace.id in seen:
            wanted = f"unique, it is that of {seen[trace.id]}"
            raise InvalidArgumentError(must_be(f"{part.where}: id", wanted, shown(trace.id)))
        seen[trace.id] = part.where
        yield part, trace


def _texts(path: Path) -> Iterator[tuple[_Part, bytes]]:
    if path.is_dir():
        for file in sorted(path.glob("*.json")):
            part = _Part(file, 0, file.stat().st_size, file.name)
            yield part, _within_limit(file.read_bytes() if part.size <= MAX_LINE_BYTES else None, file.name)
        return
    if path.exists() and not path.is_file():
        raise InvalidArgumentError(must_be("trace file", "a file or a folder", f"{path}, which is neither"))
    with path.open("rb") as lines:
        for number in itertools.count(1):
            where = f"{path.name}:{number}"
            line = _within_limit(lines.readline(MAX_LINE_BYTES + 1), where)
            if not line:
                return
            if line.strip():
                yield _Part(path, lines.tell() - len(line), len(line), where), line


def _within_limit(line: bytes | None, where: str) -> bytes:
    if line is None or len(line) > MAX_LINE_BYTES:
        raise InvalidArgumentError(must_be(f"{where}: session", f"at most {MAX_LINE_BYTES:,} bytes", "more"))
    return line


class FileTraces:
    """The sessions of a trace file or folder as a corpus, each read again when asked for.

    The whole of it is read once and validated before anything is played. Raises InvalidArgumentError as `read_traces`
    does, or when there is no session, and OSError when it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._parts: list[_Part] = []
        self.num_requests = 0
        for part, trace in _located(path):
            self._parts.append(part)
            self.num_requests += len(trace.requests)
        if not self._parts:
            raise InvalidArgumentError(must_be(f"sessions in {path}", "at least 1", 0))

    @property
    def description(self) -> str:
        return f"{self._path.name} ({len(self)} sessions)"

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, trace_idx: int) -> Trace:
        if not 0 <= trace_idx < len(self):
            raise IndexError(must_be("trace_idx", f"from 0 to {len(self) - 1}", trace_idx))
        part = self._parts[trace_idx]
        with part.path.open("rb") as file:
            file.seek(part.offset)
            return parse_trace(file.read(part.size), part.where)
