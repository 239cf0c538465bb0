"""Other beginnings and other strategies: weights from elsewhere, averaged replicas, several writers, memory."""

from __future__ import annotations

import os
import pickle
import shutil
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from grouping import grouped
from models import digest, vectors
from resumable import NUM_STEPS, build, run, setup, snapshots_of, step
from safetensors.torch import save_file
from torch.nn import functional
from waiting import wait_until
from worker_pool import WorkerPool

import paceline as pl
from paceline.checkpoint.folders import complete_steps
from paceline.checkpoint.reader import Checkpoint
from paceline.core.timing import Timing
from paceline.plan.cadence import ElChe
from paceline.run.step.planner import CadencePlanner, FixedPlanner, MeasuringPlanner
from paceline.sync.averaging.settings import SLOW_LINK
from paceline.sync.loss_scale import LossScale


def test_state_of_rank_0_is_resumed_where_each_node_has_its_own_disk(tmp_path: Path, pool: WorkerPool) -> None:
    class Best:
        loss = 9.0

        def state_dict(self) -> dict[str, float]:
            return {"loss": self.loss}

        def load_state_dict(self, state: dict[str, float]) -> None:
            self.loss = state["loss"]

    def train(folder: Path) -> tuple[int, float]:
        rank = os.environ["RANK"]
        os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = "0", "1"  # two nodes
        with setup(folder / rank, disk="per node", every_steps=4, keep_last=1) as trainer:
            best, begin = Best(), trainer.position.step
            trainer.register("best", best, "global")
            found, best.loss = best.loss, 3.0
            for epoch in trainer.epochs(begin // 11 + 1):
                for batch in epoch:
                    step(trainer, batch)
            return begin, found

    assert pool.run(train, 2, tmp_path) == [(0, 9.0), (0, 9.0)]
    # One node may have the last step, and the other one the step before.
    assert [complete_steps(tmp_path / str(rank)) for rank in range(2)] == [[8, 11]] * 2
    assert pool.run(train, 2, tmp_path) == [(11, 3.0), (11, 9.0)]


# Starting from weights alone


def weights(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return build().state_dict()


def test_a_run_can_start_from_a_safetensors_file_a_state_dict_or_a_checkpoint(tmp_path: Path) -> None:
    given = weights(9)
    save_file(given, tmp_path / "weights.safetensors")
    torch.save(given, tmp_path / "weights.pt")
    torch.save({"state_dict": given, "epoch": 3}, tmp_path / "training.ckpt")
    with setup(tmp_path / "run", init_from=tmp_path / "weights.pt") as trainer:
        trainer.save()
    for name in ("weights.safetensors", "weights.pt", "training.ckpt", "run", "run/step-00000000"):
        with setup(None, init_from=tmp_path / name) as trainer:
            assert digest(trainer.model.state_dict()) == digest(given), name
            assert trainer.position.step == 0


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "net."])
def test_weights_of_a_wrapped_model_are_those_of_the_model(prefix: str, tmp_path: Path) -> None:
    """Of DistributedDataParallel, torch.compile, both, and a LightningModule with the model as `self.net`."""
    given = weights(9)
    torch.save({"state_dict": {prefix + name: value for name, value in given.items()}}, tmp_path / "last.ckpt")
    with setup(None, init_from=tmp_path / "last.ckpt") as trainer:
        assert digest(trainer.model.state_dict()) == digest(given)


def test_a_checkpoint_to_resume_from_comes_before_weights_to_start_from(tmp_path: Path) -> None:
    save_file(weights(9), tmp_path / "weights.safetensors")
    run(tmp_path / "run", 3)
    with setup(tmp_path / "run", init_from=tmp_path / "weights.safetensors") as trainer:
        assert trainer.position.step == 3


def test_weights_of_another_model_are_named(tmp_path: Path) -> None:
    given = weights(9)
    given["8.weight"] = given.pop("8.weight")[:3].clone()
    given["9.weight"] = torch.zeros(1)
    save_file(given, tmp_path / "weights.safetensors")
    with pytest.raises(pl.errors.CheckpointError) as caught:
        setup(None, init_from=tmp_path / "weights.safetensors")
    assert "'9.weight' is only in the checkpoint" in str(caught.value)
    assert "'8.weight' is (3, 128) float32 in the checkpoint, (5, 128) float32 now" in str(caught.value)


class Malicious:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def test_code_in_a_weights_file_is_not_run(tmp_path: Path) -> None:
    sign = tmp_path / "was-run"
    torch.save({"8.weight": Malicious(sign)}, tmp_path / "weights.pt")
    (tmp_path / "weights.bin").write_bytes(pickle.dumps(Malicious(sign)))
    for name in ("weights.pt", "weights.bin"):
        with pytest.raises(
            pl.errors.CheckpointError, match=f"{name} (holds pickled objects besides tensors|cannot be read)"
        ):
            setup(None, init_from=tmp_path / name)
    assert not sign.exists()


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for name in ("none.pt", "none.safetensors"):
        with pytest.raises(pl.errors.CheckpointError, match=f"{name} cannot be read: No such file or directory"):
            setup(None, init_from=tmp_path / name)


# Several writers, memory


def test_replicated_state_may_be_written_by_several(tmp_path: Path, pool: WorkerPool) -> None:
    def main(until: int | None) -> str:
        return run(tmp_path, until, num_writers=2)

    pool.run(main, 2, 5)
    assert (tmp_path / "step-00000005" / "model.safetensors.index.json").exists()
    assert main(None) == run(None)


def test_snapshots_whose_folder_was_removed_are_written_again(tmp_path: Path) -> None:
    """systemd removes it when the user logs out."""
    steps: list[int] = []

    def remove(record: pl.StepRecord) -> None:
        wait_until(lambda: snapshots_of(tmp_path))
        shutil.rmtree(snapshots_of(tmp_path)[0].parent)
        steps.append(record.step)

    with setup(tmp_path, snapshot_every=4) as trainer:
        trainer.every(5, remove)
        for batch in next(trainer.epochs(1)):
            step(trainer, batch)
    assert steps == [5, 10]


def test_snapshots_in_memory_are_gone_when_the_run_ended_well(tmp_path: Path) -> None:
    found: list[list[Path]] = []
    with setup(tmp_path, snapshot_every=2) as trainer:
        trainer.every(7, lambda _: found.append(snapshots_of(tmp_path)))
        for batch in next(trainer.epochs(1)):
            step(trainer, batch)
    assert found[0], "no snapshot was there in the middle of the run"
    assert not snapshots_of(tmp_path)
    assert complete_steps(tmp_path) == [11]


# Averaged replicas


def average(root: Path, dtype: torch.dtype = torch.float32, how: dict[str, Any] | None = None, **settings: Any) -> str:
    """Local steps, two meetings between saves, an outer optimizer, every worker with an optimizer of its own."""
    with pl.Trainer.setup(
        lambda: torch.nn.Linear(12, 4, dtype=dtype),
        lambda params: torch.optim.Adam(params, lr=0.01),
        data=vectors(320),
        global_batch=16,
        micro_batch=4,
        strategy=pl.Averaging(
            **{"every": 2, "outer": lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True), **(how or {})}
        ),
        **grouped(shares="equal", checkpoints=pl.Checkpoints(root, every_steps=5, keep_last=None), **settings),
    ) as trainer:
        for epoch in trainer.epochs(1):
            for batch in epoch:
                trainer.backward(functional.cross_entropy(trainer.model(batch.x.to(dtype)), batch.y))
                trainer.step()
        return digest(trainer.model.state_dict(), trainer.optimizer.state_dict())


# In bfloat16 what replicas have in common is finer than their weights.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_averaged_replicas_go_on_as_they_were(tmp_path: Path, pool: WorkerPool, dtype: torch.dtype) -> None:
    ends = pool.run(average, 2, tmp_path / "a", dtype)
    assert ends[0] != ends[1], "each worker has an optimizer of its own"
    assert complete_steps(tmp_path / "a") == [5, 10, 15, 20]

    def resumed() -> str:
        return average(tmp_path / "b", dtype, resume=tmp_path / "a" / "step-00000010")

    assert pool.run(resumed, 2) == ends
    average(tmp_path / "c", dtype, resume=tmp_path / "a" / "step-00000010")  # alone
    pool.run(average, 3, tmp_path / "c", dtype)


# Saved while a fragment is under way, with residuals that differ from worker to worker.
UNDER_WAY = {"every": 6, "fragments": 3, "overlap": True, "outer": None}


@pytest.mark.parametrize(
    "how",
    [{**UNDER_WAY, "compress": "int4"}, {**UNDER_WAY, "compress": "sparse"}, asdict(SLOW_LINK)],
    ids=["int4", "sparse", "slow link"],
)
def test_compressed_replicas_go_on_as_they_were(tmp_path: Path, pool: WorkerPool, how: dict[str, Any]) -> None:
    ends = pool.run(average, 2, tmp_path / "a", torch.float32, how)

    def resumed() -> str:
        return average(tmp_path / "b", torch.float32, how, resume=tmp_path / "a" / "step-00000010")

    assert pool.run(resumed, 2) == ends
    pool.run(average, 3, tmp_path / "b", torch.float32, how)


def test_residuals_are_saved_for_each_worker(tmp_path: Path, pool: WorkerPool) -> None:
    pool.run(average, 2, tmp_path, torch.float32, {"compress": "sparse"})
    checkpoint = Checkpoint(tmp_path / "step-00000010")
    first, second = (checkpoint.load("residuals", f"rank-{rank}")["unsent"] for rank in range(2))
    assert first.shape == second.shape == (52,)
    assert first.count_nonzero()
    assert second.count_nonzero()
    assert not torch.equal(first, second)


# Parts that remember


def test_planners_go_on_with_what_they_learned() -> None:
    taught, fresh = MeasuringPlanner(8, 2), MeasuringPlanner(8, 2)
    numbers: Any = SimpleNamespace(timings=[Timing(0.1), Timing(0.3)])
    taught.observe(taught.plan(8), numbers)
    assert fresh.plan(8) != taught.plan(8)
    fresh.load_state_dict(taught.state_dict())
    assert fresh.plan(8) == taught.plan(8) == (range(6), range(6, 8))

    el_che = ElChe(2, 4)
    el_che.report_timing([4.0, 12.0], [4, 4], 2.0)
    cadence, anew = CadencePlanner(el_che, 100), CadencePlanner(ElChe(2, 4), 100)
    assert anew.plan(1000) != cadence.plan(1000)
    anew.load_state_dict(cadence.state_dict())
    assert anew.plan(1000) == cadence.plan(1000)

    FixedPlanner(4, (1.0,)).load_state_dict(FixedPlanner(4, (1.0,)).state_dict())


def test_a_loss_scale_goes_on_where_it_was() -> None:
    old, new = LossScale(growth_interval=3), LossScale(growth_interval=3)
    for is_finite in (False, True, True):
        old.update(is_loss_finite=True, is_gradient_finite=is_finite)
    new.load_state_dict(old.state_dict())
    new.update(is_loss_finite=True, is_gradient_finite=True)
    assert new.value == 65536.0  # halved, and doubled by the third finite step


def test_an_optimizer_keeps_state_that_is_finer_than_its_parameters(tmp_path: Path) -> None:
    class Fine(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    state["sum"] = state.get("sum", torch.zeros_like(parameter, dtype=torch.float64)) + parameter.grad
                    parameter.add_(state["sum"].to(parameter.dtype), alpha=-group["lr"])

    settings = {"optimizer": lambda params: Fine(params, lr=0.01)}
    run(tmp_path, 4, **settings)
    assert run(tmp_path, **settings) == run(None, **settings)
    assert complete_steps(tmp_path) == [4, NUM_STEPS]


def test_state_of_channels_last_parameters_lies_in_memory_as_they_do(tmp_path: Path) -> None:
    """Fused kernels go through memory: a contiguous momentum would belong to other weights."""

    def train(steps: int, checkpoints: pl.Checkpoints | None) -> str:
        with pl.Trainer.setup(
            lambda: torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last),
            lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
            data=torch.randn(32, 3, 5, 5, generator=torch.Generator().manual_seed(0)),
            global_batch=4,
            micro_batch=4,
            exact=True,
            checkpoints=checkpoints,
        ) as trainer:
            for epoch in trainer.epochs(max_steps=steps):
                for batch in epoch:
                    trainer.backward(trainer.model(batch).square().mean())
                    trainer.step()
            return digest(trainer.model.state_dict())

    train(3, pl.Checkpoints(tmp_path, every_steps=3))
    assert train(6, pl.Checkpoints(tmp_path, every_steps=3)) == train(6, None)
