"""Shared memory of killed services: a janitor removes it at once; where that was killed too, the next start does.

A service marks itself with a file of its name in /dev/shm that it keeps locked; the kernel unlocks it however the
service ends. Who finds a mark without a lock knows that its memory belongs to nobody. Ranks never clean up after
others: for a killed rank the supervisor does, for a killed supervisor the janitor.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from megamoe import SHM_DIR, remove_unowned, unlink_all

log = logging.getLogger("megamoe.supervisor")

_MARK = "megamoe-alive-"
# A line = all went in order. The end of input = the supervisor is gone; its ranks get a moment to go first.
_JANITOR = 'read -r line || { sleep 1; rm -f "$1"-* "$2"; }'


@contextlib.contextmanager
def marked(service: str) -> Iterator[None]:
    """The service with this name (prefix of all its segments) lives."""
    path = SHM_DIR / f"{_MARK}{service}"
    draft = SHM_DIR / f"{_MARK}draft-{os.getpid()}-{service}"
    fd = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        draft.rename(path)  # locked before anyone can find it
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


@contextlib.contextmanager
def with_janitor(service: str) -> Iterator[None]:
    """A small shell that removes the service's memory when this process dies in the body (its pipe ends)."""
    janitor = subprocess.Popen(
        [
            "/bin/sh",
            "-c",
            _JANITOR,
            "megamoe-janitor",
            str(SHM_DIR / service),
            str(SHM_DIR / f"{_MARK}{service}"),
        ],
        stdin=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    try:
        yield
    finally:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # somebody killed or stopped it
            janitor.communicate("done\n", timeout=5.0)


def remove_leftovers() -> list[str]:
    """Remove the segments of services, and the memory lent by callers, that live no more; returns their names."""
    removed = remove_unowned()
    for path in sorted(SHM_DIR.glob(f"{_MARK}megamoe-*")):
        with contextlib.suppress(OSError):  # it ended just now, or belongs to another user
            if _is_locked(path):
                continue
            removed += unlink_all(path.name.removeprefix(_MARK))
            path.unlink()
    if removed:
        log.warning("removed %d segments that killed processes had left in %s", len(removed), SHM_DIR)
    return removed


def _is_locked(path: Path) -> bool:
    fd = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(fd)
