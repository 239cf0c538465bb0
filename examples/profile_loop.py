"""torch.profiler around the loop: two steps are left out, one warms up, three are recorded.

The profiler advances with the optimizer's steps, in a hook that every worker runs, so all record the same ones. Each
writes a trace for ui.perfetto.dev; the first prints what took longest. `paceline timeline` shows where workers wait for
one another, the profiler which operators take the time.

    python examples/profile_loop.py
    paceline run --workers 2 examples/profile_loop.py traces
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

import paceline as pl

NUM_RECORDED = 3


def train(folder: Path) -> tuple[pl.Trainer, Path]:
    """The trainer, and this worker's trace."""
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with pl.Trainer.setup(
        lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1)),
        lambda params: torch.optim.AdamW(params, lr=1e-3),
        data=(x, x.sum(dim=1, keepdim=True)),
        global_batch=64,
        micro_batch=16,
    ) as trainer:
        path = folder / f"rank-{trainer.world.rank}.json"

        def write(profiler: profile) -> None:
            profiler.export_chrome_trace(str(path))
            if trainer.is_main:
                averages = profiler.key_averages()
                print(averages.table(sort_by="self_cpu_time_total", row_limit=8, max_name_column_width=40))

        plan = schedule(wait=2, warmup=1, active=NUM_RECORDED, repeat=1)
        with profile(activities=activities, schedule=plan, on_trace_ready=write) as profiler:
            trainer.every(1, lambda _: profiler.step())
            for epoch in trainer.epochs(1):
                for batch in epoch:
                    with record_function("forward and loss"):
                        loss = F.mse_loss(trainer.model(batch.x), batch.y)
                    with record_function("backward"):
                        trainer.backward(loss)
                    with record_function("end of micro-batch"):  # of the last one: exchange and optimizer
                        trainer.step()
    return trainer, path


def main() -> int:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        trainer, path = train(folder)
        names = [event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]]
    num_steps = len({name for name in names if name.startswith("ProfilerStep#")})
    num_micro_batches = names.count("backward")  # of this worker; with several, its share may be empty
    print(f"rank {trainer.world.rank}: {num_steps} steps and {num_micro_batches} micro-batches in the trace")
    return 0 if num_steps == NUM_RECORDED and (num_micro_batches or trainer.world.size > 1) else 1


if __name__ == "__main__":
    sys.exit(main())
