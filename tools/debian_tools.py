"""Unpack programs that only Debian packages carry into `.tools/`, without root and without installing them.

Owns: `.tools/`, one folder a tool, each with a stamp that names the packages inside. Refuses: to go on without the
tool (ToolError says what was tried); no caller may turn that into a skipped test.
A program found on PATH is taken as it is. Otherwise `apt-get download` and `dpkg-deb -x`; where apt has no package
lists yet, they are fetched into `.tools/apt` first, which needs no root either.

    python tools/debian_tools.py prometheus    unpack, print where the programs are
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / ".tools"
DOWNLOAD_TIMEOUT_S = 300
PROBE_TIMEOUT_S = 30


class ToolError(Exception):
    """A program could not be provided. The message names the program and what was tried."""


@dataclass(frozen=True)
class DebianTool:
    """One tool: its packages and its programs (path in the tree).

    closure: with all packages that apt would install for them here; the programs are then scripts under `run/`, which
    start the real ones with the unpacked libraries and fonts.
    """

    packages: tuple[str, ...]
    programs: tuple[str, ...]
    closure: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Program names without their folder."""
        return tuple(Path(program).name for program in self.programs)


KNOWN = {
    # Go programs: they need libc alone, and their web pages' packages are not needed to scrape and query.
    "prometheus": DebianTool(("prometheus",), ("usr/bin/prometheus", "usr/bin/promtool")),
    # A browser without windows, and letters for it.
    "chromium": DebianTool(
        ("chromium-headless-shell", "fonts-dejavu-core"),
        ("usr/lib/chromium/chromium-headless-shell",),
        closure=True,
    ),
}


def provide(tool_name: str, tools: Path = TOOLS) -> dict[str, Path]:
    """Program name -> path of every program of `tool_name`, unpacked now if need be. Raises ToolError."""
    if tool_name not in KNOWN:
        raise ToolError(f"tool must be one of {', '.join(sorted(KNOWN))}, got {tool_name!r}")
    tool = KNOWN[tool_name]
    on_path = {name: shutil.which(name) for name in tool.names}
    if all(on_path.values()):
        return {name: Path(path) for name, path in on_path.items() if path}
    folder = tools / tool_name
    with lock(tools):
        if not _is_complete(folder, tool):
            _unpack(tool, folder, tools)
    if tool.closure:
        return {name: folder / "run" / name for name in tool.names}
    return {name: folder / program for name, program in zip(tool.names, tool.programs, strict=True)}


def _is_complete(folder: Path, tool: DebianTool) -> bool:
    stamp = folder / ".stamp"
    return stamp.exists() and stamp.read_text() == _stamp_text(tool)


def _stamp_text(tool: DebianTool) -> str:
    return "".join(f"{line}\n" for line in (*tool.packages, *tool.programs))


@contextmanager
def lock(tools: Path) -> Iterator[None]:
    """One unpacking at a time, also between processes."""
    tools.mkdir(parents=True, exist_ok=True)
    with (tools / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _unpack(tool: DebianTool, folder: Path, tools: Path) -> None:
    """Download, unpack beside `folder`, try every program, then move into place in one step."""
    for needed in ("apt-get", "dpkg-deb"):
        if not shutil.which(needed):
            raise ToolError(
                f"{', '.join(tool.names)} must be on PATH, or {needed} must be there to unpack "
                f"the Debian package {tool.packages[0]}; neither is"
            )
    with tempfile.TemporaryDirectory(dir=tools) as temp:
        debs, tree = Path(temp) / "debs", Path(temp) / "tree"
        debs.mkdir()
        _download(tool, debs, tools)
        for deb in sorted(debs.glob("*.deb")):
            run(["dpkg-deb", "-x", str(deb), str(tree)])
        for program in tool.programs:
            _probe(_script(tree, tree / program) if tool.closure else tree / program)
        (tree / ".stamp").write_text(_stamp_text(tool))
        if folder.exists():
            shutil.rmtree(folder)
        tree.rename(folder)


def _download(tool: DebianTool, into: Path, tools: Path) -> None:
    """Download the packages; when apt knows nothing of them, fetch package lists of our own first."""
    as_root = ["-o", "APT::Sandbox::User=root"] if os.geteuid() == 0 else []
    try:
        _fetch(tool, into, as_root)
    except ToolError:
        state = tools / "apt"
        for sub in ("lists/partial", "cache/archives/partial"):
            (state / sub).mkdir(parents=True, exist_ok=True)
        own = ["-o", f"Dir::State::lists={state / 'lists'}", "-o", f"Dir::Cache={state / 'cache'}"]
        run(["apt-get", *as_root, *own, "update"])
        _fetch(tool, into, [*as_root, *own])


def _fetch(tool: DebianTool, into: Path, options: Sequence[str]) -> None:
    packages = list(tool.packages)
    if tool.closure:
        plan = run(
            ["apt-get", *options, "-s", "install", "--reinstall", "--no-install-recommends", *packages]
        )
        packages = re.findall(r"^Inst (\S+)", plan, re.MULTILINE)
    run(["apt-get", *options, "download", *packages], cwd=into)


def _script(tree: Path, program: Path) -> Path:
    """A script that runs `program` with the libraries and fonts of its tree; the tree may be moved."""
    folders = sorted({str(lib.parent.relative_to(tree)) for lib in tree.glob("usr/lib/*-linux-*/**/*.so*")})
    script = tree / "run" / program.name
    script.parent.mkdir(exist_ok=True)
    script.write_text(
        "#!/bin/sh\n"
        'tree=$(dirname "$(dirname "$(readlink -f "$0")")")\n'
        f'export LD_LIBRARY_PATH="{":".join(f"$tree/{folder}" for folder in folders)}"\n'
        'export XDG_DATA_HOME="$tree/usr/share"\n'
        '[ -e /etc/fonts/fonts.conf ] || export FONTCONFIG_PATH="$tree/etc/fonts"\n'
        f'exec "$tree/{program.relative_to(tree)}" "$@"\n'
    )
    script.chmod(0o755)
    return script


def _probe(program: Path) -> None:
    """A program that does not even print its version misses a library: say so now, not in a test."""
    if not program.exists():
        raise ToolError(f"{program.name} is not in the package; KNOWN must say where it is")
    run([str(program), "--version"], timeout_s=PROBE_TIMEOUT_S)


def run(command: Sequence[str], cwd: Path | None = None, timeout_s: float = DOWNLOAD_TIMEOUT_S) -> str:
    """Run a command; returns its output. Raises ToolError with the command and the end of what it said."""
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolError(f"{' '.join(command)}: {error}") from error
    if done.returncode != 0:
        words = (done.stderr.strip() or done.stdout.strip())[-800:]
        raise ToolError(f"{' '.join(command)}: exit status {done.returncode}: {words}")
    return done.stdout


def provide_named(
    prog: str, known: Iterable[str], provide: Callable[[str], Mapping[str, Path]], argv: Sequence[str] | None
) -> int:
    """The command line of a module that provides tools: print the programs of those named; returns the exit status."""
    parser = argparse.ArgumentParser(prog=prog)
    parser.add_argument("tools", nargs="+", choices=sorted(known))
    try:
        for name in parser.parse_args(argv).tools:
            for program, path in provide(name).items():
                print(f"{program}: {path}")
    except ToolError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Provide the tools named; returns the exit status."""
    return provide_named("debian_tools", KNOWN, provide, argv)


if __name__ == "__main__":
    raise SystemExit(main())
