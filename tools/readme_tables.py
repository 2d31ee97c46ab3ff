"""Write the tables of README.md that follow from code: settings (ServiceConfig) and metrics (service.metrics).

`python tools/readme_tables.py` rewrites what stands between the markers; `--check` only says whether it is fresh.
"""

from __future__ import annotations

import sys
from pathlib import Path

from service.config import ENV_PREFIX, ServiceConfig, default_text
from service.metrics import RankMetrics

COMMON_LABELS = {"rank", "model_name", "le"}
README = Path(__file__).resolve().parent.parent / "README.md"


def settings_table() -> str:
    """One row per setting: field, default, environment variable, meaning."""
    lines = ["| setting | default | environment | meaning |", "|---|---|---|---|"]
    for name, info in ServiceConfig.model_fields.items():
        default = default_text(name)
        shown = f"`{default}`" if default else ""
        text = str(info.description).replace("|", "\\|")
        lines.append(f"| `{name}` | {shown} | `{ENV_PREFIX}{name.upper()}` | {text} |")
    return "\n".join(lines)


def metrics_table() -> str:
    """One row per metric family of rank 0, with its own labels; every series has `rank` and `model_name` too."""
    lines = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    metrics = RankMetrics(rank=0, model_name="any", bundle=ServiceConfig().bundle)
    try:
        for family in metrics.registry.collect():
            labels = sorted({label for sample in family.samples for label in sample.labels} - COMMON_LABELS)
            name = family.name + ("_total" if family.type == "counter" else "")
            shown = ", ".join(f"`{label}`" for label in labels)
            lines.append(f"| `{name}` | {family.type} | {shown} | {family.documentation} |")
    finally:
        metrics.close()
    return "\n".join(lines)


def refreshed(text: str) -> str:
    """README's text with both tables as they should be. Raises ValueError when a marker is missing."""
    for name, table in (("settings", settings_table()), ("metrics", metrics_table())):
        opening, closing = f"<!-- {name}: tools/readme_tables.py -->", f"<!-- end {name} -->"
        if text.count(opening) != 1 or text.count(closing) != 1:
            raise ValueError(
                f"README.md must have one {name} table between its markers {opening} and {closing}"
            )
        before, rest = text.split(opening)
        text = f"{before}{opening}\n{table}\n{closing}{rest.split(closing)[1]}"
    return text


def main() -> int:
    """Rewrite, or with --check compare; 1 when stale."""
    text = README.read_text()
    wanted = refreshed(text)
    if "--check" in sys.argv[1:]:
        if text != wanted:
            print("README.md's tables are stale: run `python tools/readme_tables.py`")
            return 1
        return 0
    README.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
