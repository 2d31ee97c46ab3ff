"""Memory that a co-located caller lends to a rank: by id, bound to a lease, in use until its calls are answered.

Owns which tensors a call names and what can be wrong with them. Opens and closes nothing itself: whoever puts memory in
says what to do when nothing uses it any more.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megamoe import MX_BLOCK, OpenMemory
from megamoe.errors import InvalidArgumentError, must_be


class LentMemory:
    """One opened piece of a caller's memory. on_unused: called once, when it is dropped and no call uses it."""

    __slots__ = ("_is_dropped", "_memory", "_num_users", "_on_unused", "lease_serial", "memory_id")

    def __init__(
        self,
        memory_id: int,
        lease_serial: int,
        memory: OpenMemory,
        on_unused: Callable[[OpenMemory], None],
    ) -> None:
        self.memory_id = memory_id
        self.lease_serial = lease_serial
        self._memory = memory
        self._on_unused = on_unused
        self._num_users = 0
        self._is_dropped = False

    def view(self, name: str, offset: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """[rows, columns] at an offset. Raises InvalidArgumentError naming the tensor: not aligned, not inside."""
        try:
            return self._memory.tensor(offset, (rows, columns), dtype)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{name} in memory {self.memory_id}: {error}") from None

    def use(self) -> None:
        self._num_users += 1

    def release(self) -> None:
        """A call that used it is answered."""
        self._num_users -= 1
        if self._is_dropped:
            self._end_if_unused()

    def drop(self) -> None:
        """No new call may name it. Once."""
        self._is_dropped = True
        self._end_if_unused()

    def _end_if_unused(self) -> None:
        if not self._num_users:
            self._on_unused(self._memory)


class LentTable:
    """The memories of one caller. One thread at a time (the step loop's lock).

    on_drop: called when one goes, so that nobody keeps tensors in it.
    """

    def __init__(self, on_drop: Callable[[], None]) -> None:
        self._on_drop = on_drop
        self._by_id: dict[int, LentMemory] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def put(self, memory: LentMemory) -> None:
        """Raises InvalidArgumentError for an id that is taken. Memory of an earlier lease goes."""
        for other in [known for known in self._by_id.values() if known.lease_serial != memory.lease_serial]:
            self.drop(other.memory_id)
        if memory.memory_id in self._by_id:
            raise InvalidArgumentError(must_be("memory_id", "a new one", memory.memory_id))
        self._by_id[memory.memory_id] = memory

    def drop(self, memory_id: int) -> None:
        """Raises InvalidArgumentError for an id that is not there."""
        if memory_id not in self._by_id:
            raise InvalidArgumentError(must_be("memory_id", "one that is registered", memory_id))
        self._on_drop()
        self._by_id.pop(memory_id).drop()

    def drop_all(self) -> None:
        for memory_id in list(self._by_id):
            self.drop(memory_id)

    def _get(self, field: str, memory_id: int, lease_serial: int) -> LentMemory:
        memory = self._by_id.get(memory_id)
        if memory is None or memory.lease_serial != lease_serial:
            wanted = f"registered in lease {lease_serial} ({', '.join(map(str, self._by_id)) or 'none'})"
            raise InvalidArgumentError(must_be(field, wanted, memory_id))
        return memory

    def rows(
        self,
        places: tuple[int, int, int, int, int],
        lease_serial: int,
        num_rows: int,
        hidden: int,
        mxfp8: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, tuple[LentMemory, ...]]:
        """(hidden_states, their scales or None, out, the memories that they lie in) of a call with such `places`.

        Raises InvalidArgumentError naming field, wanted and got.
        """
        rows_id, out_id, rows_at, sf_at, out_at = places
        source = self._get("memory of hidden_states", rows_id, lease_serial)
        target = self._get("memory of out", out_id, lease_serial)
        x = source.view("hidden_states", rows_at, num_rows, hidden, torch.uint8 if mxfp8 else torch.bfloat16)
        sf = None
        if mxfp8:
            sf = source.view("hidden_states_sf", sf_at, num_rows, hidden // MX_BLOCK, torch.uint8)
        out = target.view("out", out_at, num_rows, hidden, torch.bfloat16)
        if source is target:
            row_bytes = hidden if mxfp8 else 2 * hidden
            _check_apart("hidden_states", rows_at, num_rows * row_bytes, out_at, num_rows * 2 * hidden)
            if mxfp8:
                _check_apart(
                    "hidden_states_sf", sf_at, num_rows * (hidden // MX_BLOCK), out_at, num_rows * 2 * hidden
                )
        return x, sf, out, (source,) if source is target else (source, target)


def _check_apart(name: str, at: int, num_bytes: int, out_at: int, out_bytes: int) -> None:
    if at < out_at + out_bytes and out_at < at + num_bytes:
        wanted = f"apart from {name} at [{at}, {at + num_bytes})"
        raise InvalidArgumentError(
            must_be("out in the same memory", wanted, f"[{out_at}, {out_at + out_bytes})")
        )
