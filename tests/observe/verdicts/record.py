"""Records the runs that test_recorded_runs.py judges: python tests/observe/verdicts/record.py [NAME...]

Each is a real run of `paceline train` on this machine, with a fault injected: into the model, the data, the settings,
or into one worker by a CPU quota (needs root and a cgroup v1 cpu controller). Of its folder, the files that verdicts
read are kept, cut to their last lines. Look at a new recording: `paceline doctor FOLDER` must name the fault.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any

import yaml

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(ROOT))

from bench.cpu_quota import cpu_quota  # noqa: E402
from paceline.observe.run_files import RunFiles  # noqa: E402

KEPT_LINES = 60
TIMEOUT_S = 240.0

PARTS = """
import time
import torch
from torch import nn
from torch.nn import functional


def model(width=768, depth=4):
    layers = [nn.Linear(64, width), nn.Tanh()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def linear_model(width, depth):
    return nn.Linear(64, 1)


def data(count=4096):
    x = torch.randn(count, 64, generator=torch.Generator().manual_seed(1))
    return x, x[:, :8].sum(1, keepdim=True) + torch.randn(count, 1, generator=torch.Generator().manual_seed(2))


class SlowSamples(torch.utils.data.Dataset):
    def __init__(self, read_s, slow_rank=None):
        self.x, self.y = data()
        self.read_s, self.slow_rank = read_s, slow_rank

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        import os
        if self.slow_rank is None or os.environ.get("RANK") == str(self.slow_rank):
            time.sleep(self.read_s)
        return self.x[i], self.y[i]


def loss(model, batch):
    x, y = batch
    return functional.mse_loss(model(x), y)
"""
CONFIG = """
model: {{factory: {model}, arguments: {{width: {width}, depth: {depth}}}}}
data: {{train: {{factory: {data}}}}}
loss: parts:loss
optimizer: {optimizer}
workers: {workers}
devices: cpu
checkpoints: {{save: false}}
trainer:
  {{global_batch: {global_batch}, micro_batch: {micro_batch}, max_steps: {steps}, epochs: 1000, {rate},
   log_every: {log_every}, threads: 1, backend: {backend}, overlap: {overlap}}}
"""
USUAL = {
    "width": 768,
    "depth": 4,
    "data": "parts:data",
    "workers": 2,
    "global_batch": 256,
    "micro_batch": 16,
    "steps": 120,
    "log_every": 5,
    "model": "parts:model",
    "rate": "learning_rate: 0.0001",
    "optimizer": "null",
    "backend": "null",
    "overlap": "true",
}
RISING_RATE = {
    "model": "parts:linear_model",
    "optimizer": "{factory: torch.optim:SGD, arguments: {lr: 1.3}}",
    "rate": "warmup_steps: 100, schedule: constant",
}
RUNS: dict[str, dict[str, Any]] = {
    "healthy": {},
    "one_worker": {"workers": 1},
    "slow_worker": {"workers": 3, "micro_batch": 8, "steps": 200, "fault": "quota"},
    "slow_reader": {"data": "parts:SlowSamples, arguments: {read_s: 0.002}"},
    "one_slow_reader": {"data": "parts:SlowSamples, arguments: {read_s: 0.004, slow_rank: 1}"},
    "exchange": {
        "width": 2048,
        "global_batch": 4,
        "micro_batch": 2,
        "steps": 60,
        "backend": "gloo",
        "overlap": "false",
    },
    "diverging": {**RISING_RATE, "steps": 85, "log_every": 2},
    "overflowed": {**RISING_RATE, "steps": 400},
    "stopped_worker": {"steps": 100_000, "fault": "stop"},
}


def main(names: list[str]) -> None:
    for name in names or RUNS:
        with tempfile.TemporaryDirectory() as folder:
            record(name, Path(folder))


def record(name: str, folder: Path) -> None:
    settings = dict(RUNS[name])
    fault = settings.pop("fault", None)
    (folder / "parts.py").write_text(PARTS)
    (folder / "project.yaml").write_text(CONFIG.format(**USUAL | settings))
    files = RunFiles(folder / name)
    environment = os.environ | {"PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{folder}"}
    command = [sys.executable, "-m", "paceline", "train", "project.yaml", "--run-folder", name, "-q"]
    with quota() if fault == "quota" else nullcontext() as group:
        process = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True)
        try:
            if fault is None:
                process.wait(TIMEOUT_S)
                keep(files, HERE / name)
                return
            wait_for(lambda: num_lines(files) >= 12)
            pid = worker_pid(files, 1)
            if fault == "quota":
                group.add(pid)
                process.wait(TIMEOUT_S)
                keep(files, HERE / name)
            else:
                os.kill(pid, signal.SIGSTOP)
                sleep(8.0)  # the time without a step is what is recorded
                keep(files, HERE / name)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@contextmanager
def quota() -> Any:
    with cpu_quota(0.06) as group:
        yield group


def keep(files: RunFiles, target: Path) -> None:
    """The files that verdicts read, and their ages."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    ages = {}
    for path in [files.status, files.environment, files.config, files.metrics, files.events]:
        if path.is_file():
            (target / path.name).write_text(shortened(path))
            ages[path.name] = round(time() - path.stat().st_mtime, 2)
    for path in sorted(files.ranks.glob("rank-*.json")):
        (target / "ranks").mkdir(exist_ok=True)
        shutil.copy(path, target / "ranks" / path.name)
        ages[f"ranks/{path.name}"] = round(time() - path.stat().st_mtime, 2)
    (target / "ages_s.json").write_text(json.dumps(ages))
    print(f"{target}: {sum(path.stat().st_size for path in target.rglob('*.*')) / 1e3:.1f} kB")


def shortened(path: Path) -> str:
    text = path.read_text()
    if path.suffix == ".jsonl":
        return "".join(text.splitlines(keepends=True)[-KEPT_LINES:])
    if path.suffix == ".yaml":
        settings = {name: yaml.safe_load(text)[name] for name in ("optimizer", "trainer")}
        return yaml.safe_dump(settings, default_flow_style=None, width=120)
    if path.stem == "environment":
        return json.dumps({name: json.loads(text)[name] for name in ("host", "devices")})
    # As if read on another host: a live run's process cannot be looked for.
    return json.dumps({**json.loads(text), "host": "recorded"})


def num_lines(files: RunFiles) -> int:
    return len(files.metrics.read_text().splitlines()) if files.metrics.is_file() else 0


def worker_pid(files: RunFiles, rank: int) -> int:
    return int(json.loads((files.ranks / f"rank-{rank}.json").read_text())["pid"])


def wait_for(condition: Callable[[], bool]) -> None:
    until = monotonic() + TIMEOUT_S
    while not condition():
        if monotonic() > until:
            raise TimeoutError("the run did not get this far")
        sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1:])
