"""Python programs whose own pins must not meet ours, each in a virtual environment under `.tools/`.

Owns: `.tools/<tool>`, stamped with its place and the pins that it was made from (constraints/<tool>.txt: every package,
exact).
Refuses: to go on without the tool (ToolError says what pip said); no caller may turn that into a skipped test.

    python tools/python_tools.py aiperf    install, print where the programs are
"""

from __future__ import annotations

import shutil
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):  # run as a file: the folder above is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.debian_tools import ROOT, TOOLS, ToolError, lock, provide_named, run

INSTALL_TIMEOUT_S = 900

KNOWN = {
    # A public load generator for OpenAI-compatible endpoints; `loadgen engine` is tested with it.
    "aiperf": ("aiperf",),
    # The public harness that replays recorded AgentX sessions; its loader must read the trace files written here.
    "agentx-harness": ("python",),
}
"""Tool -> its programs."""


def provide(tool_name: str, tools: Path = TOOLS, constraints: Path = ROOT / "constraints") -> dict[str, Path]:
    """Program name -> path of every program of `tool_name`, installed now if need be. Raises ToolError."""
    if tool_name not in KNOWN:
        raise ToolError(f"tool must be one of {', '.join(sorted(KNOWN))}, got {tool_name!r}")
    folder, pins = tools / tool_name, constraints / f"{tool_name}.txt"
    stamp = folder / ".stamp"
    # Scripts of a virtual environment name its interpreter by its full path: one that was moved is made again.
    wanted = f"{folder.resolve()}\n{pins.read_text()}"
    with lock(tools):
        if not (stamp.exists() and stamp.read_text() == wanted):
            if folder.exists():
                shutil.rmtree(folder)
            venv.create(folder, with_pip=True, symlinks=True)
            # The pins name everything, so pip need not resolve: that halves its work.
            pip = [
                str(folder / "bin" / "python"),
                "-m",
                "pip",
                "install",
                "-qq",
                "--disable-pip-version-check",
            ]
            run([*pip, "--no-deps", "-r", str(pins)], timeout_s=INSTALL_TIMEOUT_S)
            stamp.write_text(wanted)
    return {program: folder / "bin" / program for program in KNOWN[tool_name]}


def main(argv: Sequence[str] | None = None) -> int:
    """Provide the tools named; returns the exit status."""
    return provide_named("python_tools", KNOWN, provide, argv)


if __name__ == "__main__":
    raise SystemExit(main())
