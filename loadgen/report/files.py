"""The files that a run leaves: report.json, one request a line in requests.jsonl, one line a second in slices.csv."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loadgen.report.figures import itl_of
from loadgen.report.report import PATHS
from loadgen.steps.records import RequestRecord, RunPhase, RunRecord, Status


def request_line(request: RequestRecord, zero_s: float) -> dict[str, Any]:
    """One request as a JSON object; times in seconds from `zero_s`."""
    line = asdict(request)
    line["start_s"] = request.start_s - zero_s
    line["end_s"] = request.end_s - zero_s
    line["emissions"] = [round(at - zero_s, 6) for at in request.emissions]
    if request.status is Status.COMPLETED:
        line["ttft"] = request.ttft_s
        line["e2el"] = request.e2el_s
        line["itl"] = itl_of(request) if request.num_output >= 2 else None
    return line


def slice_rows(record: RunRecord, slice_s: float) -> list[dict[str, Any]]:
    """The profile cut into slices of slice_s: what ended in each. Path columns count steps by the path that served
    them (a step that was cut counts once for each piece)."""
    if not record.profile_end_s:
        return []
    span = record.profile_end_s - record.profile_start_s
    rows: list[dict[str, Any]] = [
        {"start_s": idx * slice_s, "steps": 0, "prefill_steps": 0, "decode_steps": 0}
        | dict.fromkeys(PATHS, 0)
        | {"max_rows": 0, "decode_max_rows": 0, "output_tokens": 0, "completed": 0, "failed": 0}
        for idx in range(max(1, math.ceil(span / slice_s)))
    ]

    def row_at(time_s: float) -> dict[str, Any]:
        return rows[min(int((time_s - record.profile_start_s) / slice_s), len(rows) - 1)]

    for step in record.steps:
        if step.run_phase is not RunPhase.PROFILE:
            continue
        row = row_at(step.end_s)
        row["steps"] += 1
        row[f"{step.phase}_steps"] += 1
        for path in step.paths:
            row[path] += 1
        row["max_rows"] = max(row["max_rows"], step.max_rows)
        if step.phase == "decode":
            row["decode_max_rows"] = max(row["decode_max_rows"], step.max_rows)
        row["output_tokens"] += step.num_tokens
    for request in record.requests:
        if request.phase is RunPhase.PROFILE and request.status in (Status.COMPLETED, Status.FAILED):
            row_at(request.end_s)[str(request.status)] += 1
    return rows


def write_report(folder: Path, report: dict[str, Any], record: RunRecord, slice_s: float) -> Path:
    """Write report.json, requests.jsonl and slices.csv into `folder`; returns the path of the JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "requests.jsonl").open("w", encoding="utf-8") as out:
        for request in record.requests:
            out.write(json.dumps(request_line(request, record.run_start_s), allow_nan=False) + "\n")
    rows = slice_rows(record, slice_s)
    with (folder / "slices.csv").open("w", encoding="utf-8", newline="") as out:
        if rows:
            writer = csv.DictWriter(out, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    path = folder / "report.json"
    path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return path
