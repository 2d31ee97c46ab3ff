"""What the README shows works as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.e2e.harness import ROOT, ServiceProcess


def test_the_client_example_runs(running_service: ServiceProcess) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert "127.0.0.1:50051" in example
    done = subprocess.run(
        [sys.executable, "-c", example.replace("127.0.0.1:50051", running_service.front)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert "torch.Size([4, 256]) ['small_m']" in done.stdout
