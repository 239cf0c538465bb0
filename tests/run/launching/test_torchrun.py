"""A world that torchrun started: `Trainer.setup` joins it, and the result is the one of a worker alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from scenarios import train

SCRIPT = """
import os

from scenarios import train

outcome = train("mlp", [6, 2])
if os.environ["RANK"] == "0":
    print(os.environ["WORLD_SIZE"], outcome.digest)
"""


def test_torchruns_world_is_joined(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    tests = Path(__file__).parents[2]
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *("--log-dir", str(tmp_path / "logs"), str(script)),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), str(tests / "run")])},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["2", train("mlp").digest]
