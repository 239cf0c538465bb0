"""GPUs that cannot run a kernel: this build of torch may have none for them, or they are broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

# What a launcher found out, for its workers.
LEFT_OUT_VARIABLE = "PACELINE_LEFT_OUT"
_MODELS = Path("/proc/driver/nvidia/gpus")
_PROBE_TIMEOUT_S = 120.0
# In a process of its own: trying a GPU takes half a gigabyte of its memory until the process ends.
_PROBE = """
import json, torch
found = {}
for index in range(torch.cuda.device_count()):
    try:
        torch.ones(1, device=f"cuda:{index}").add_(1).item()
    except RuntimeError as error:
        found[index] = f"{torch.cuda.get_device_name(index)}: {str(error).splitlines()[0]}"
print(json.dumps(found))
"""


@cache
def left_out() -> dict[int, str]:
    """The GPUs that cannot run a kernel, by number: name and reason. Imports no torch into this process.

    Tried only where the machine has unlike GPUs: if all are alike, there is nothing to choose, and the run's set-up
    reports the error. Does not leave out all of them.
    """
    if (told := os.environ.get(LEFT_OUT_VARIABLE)) is not None:
        return {int(index): reason for index, reason in json.loads(told).items()}
    if len(_models()) < 2:
        return {}
    command = [sys.executable, "-c", _PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return {int(index): reason for index, reason in json.loads(done.stdout.splitlines()[-1]).items()}


def _models() -> set[str]:
    """The models of the machine's GPUs, as the driver lists them."""
    texts = [path.read_text(errors="replace") for path in _MODELS.glob("*/information")]
    lines = (line for text in texts for line in text.splitlines())
    return {line.partition(":")[2].strip() for line in lines if line.startswith("Model:")}
