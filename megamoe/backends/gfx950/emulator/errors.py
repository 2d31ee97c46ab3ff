"""Errors of the emulated device: each names the kernel, and where it can, wave, instruction and address."""

from __future__ import annotations

from typing import ClassVar

from megamoe.errors import InternalError, OperatorError


class EmulatorError(InternalError):
    """Base of everything that the emulated device refuses or finds."""

    code: ClassVar[str] = "emulator"


class CodeObjectError(EmulatorError):
    """A code object is malformed or is not for gfx950."""


class DecodeError(EmulatorError):
    """A word of machine code is no instruction of gfx950."""


class UnimplementedInstructionError(EmulatorError):
    """An instruction that the emulator decodes but does not execute was reached."""


class MemoryFaultError(EmulatorError):
    """An address outside of every allocation, of another rank's private memory, or misaligned for an atomic."""


class DeadlockError(EmulatorError):
    """Nothing can go on; the message says who waits for what."""


class BudgetError(EmulatorError):
    """The instruction budget of a run was used up before its launches ended."""


class FindingError(EmulatorError):
    """A detector has reported races or missing waits; `findings` are the reports, the message lists them."""

    def __init__(self, message: str, findings: tuple[object, ...] = ()) -> None:
        super().__init__(message)
        self.findings = findings


class ToolchainError(OperatorError):
    """The emulator's core could not be compiled: no C compiler, or one that failed."""

    code: ClassVar[str] = "config"
