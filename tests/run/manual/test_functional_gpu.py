"""The functional interface on a GPU. CI has none; run by hand where there is one."""

from __future__ import annotations

import pytest
import torch
from models import SmallResNet, digest, images, mlp
from step_by_step import X, Y, adam, everything, sgd
from torch import nn
from torch.nn import functional

import paceline as pl

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_gpu
@pytest.mark.gpu
def test_replicas_on_a_gpu_end_with_the_bits_of_a_trainer_there() -> None:
    build, data = SmallResNet, images(26)
    with pl.Trainer.setup(build, adam, data=data, global_batch=8, micro_batch=4, exact=True) as trainer:
        for epoch in trainer.epochs(2):
            for batch in epoch:
                trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
                trainer.step()
        expected = digest(trainer.model.state_dict(), trainer.optimizer.state_dict())
    with pl.compat.resnetimagenet.prepare_training(build, data, ["cuda:0"] * 2, adam, 4, epochs=2, exact=True) as state:
        pl.compat.resnetimagenet.train(functional.cross_entropy, state, validation=data)
        assert everything(state) == [expected] * 2


@needs_gpu
@pytest.mark.gpu
def test_devices_of_two_kinds_and_a_loss_on_the_host() -> None:
    def loss_on_host(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output.cpu(), target.cpu())

    results = []
    for devices in (["cpu", "cpu"], ["cpu", "cuda:0"], ["cuda:0", "cpu"]):
        with pl.compat.resnetimagenet.prepare_training(mlp, (X, Y), devices, adam, 4, epochs=2) as state:
            losses = pl.compat.resnetimagenet.train(loss_on_host, state).losses
            results.append(({k: v.cpu() for k, v in state.models[1].state_dict().items()}, losses))
    for weights, losses in results[1:]:
        torch.testing.assert_close(weights, results[0][0], rtol=1e-4, atol=1e-5)
        assert losses == pytest.approx(results[0][1], rel=1e-4)


@needs_gpu
@pytest.mark.gpu
def test_a_gpu_that_is_full_runs_halves() -> None:
    free, _ = torch.cuda.mem_get_info()
    width = 1 << 20
    nsamples = 8 * (free // (8 * 4 * width))  # a few activations of this size are more than there is

    def wide(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return model(batch).expand(-1, width).exp().sin(), batch

    with (
        pl.compat.resnetimagenet.prepare_training(
            nn.Linear(1, 1), torch.randn(nsamples, 1), ["cuda:0"], sgd, nsamples, forward_fn=wide
        ) as state,
        pytest.warns(UserWarning, match="do not fit in the memory of cuda:0"),
    ):
        history = pl.compat.resnetimagenet.train(lambda output, _: output.mean(), state)
    assert len(history.losses) == 1
