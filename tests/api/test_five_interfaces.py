"""One engine: five ways to write the same training, and the same weights to the last bit."""

from __future__ import annotations

from typing import Any

import torch
from models import SmallResNet, digest, images
from torch import nn
from torch.nn import functional
from worker_pool import WorkerPool

import paceline as pl
from paceline.run.step.build import build_model

# Two replicas, or a global batch of two micro-batches.
REPLICAS, MICRO_BATCH, EPOCHS, SEED = 2, 4, 2, 11
X, Y = images(40)
NUM_STEPS = EPOCHS * 5
PAIRS = [(X[i : i + MICRO_BATCH].clone(), Y[i : i + MICRO_BATCH].clone()) for i in range(0, len(X), MICRO_BATCH)]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True)  # as all but Ddp would have it anyway


def build() -> nn.Module:
    """In evaluation mode: BatchNorm's statistics are each interface's own affair, and tested there."""
    return SmallResNet().eval()


def setup() -> str:
    with pl.Trainer.setup(
        build, sgd, data=(X, Y), global_batch=REPLICAS * MICRO_BATCH, micro_batch=MICRO_BATCH, shuffle=False, seed=SEED,
        exact=True, optimization=pl.Optimization(train_mode=False),
    ) as trainer:  # fmt: skip
        for epoch in trainer.epochs(EPOCHS):
            for batch in epoch:
                trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
                trainer.step()
        return digest(trainer.model.state_dict())


def dp_train() -> str:
    result = pl.dp_train(
        build, PAIRS, loss_fn=functional.cross_entropy, forward_fn=lambda model, pair: model(pair[0]),
        target_fn=lambda pair: pair[1], n_gpu=REPLICAS, n_iter=NUM_STEPS, optimizer=sgd, seed=SEED, exact=True,
        verbose=False, optimization=pl.Optimization(train_mode=False),
    )  # fmt: skip
    return digest(result.model.cpu().state_dict())


def builder(num_workers: int = 1) -> str:
    handle = (
        pl.Trainer.builder(build, sgd, lambda model, batch: functional.cross_entropy(model(batch.x), batch.y))
        .dataset((X, Y))
        .batch_size(REPLICAS * MICRO_BATCH)
        .num_epochs(EPOCHS)
        .seed(SEED)
        .settings(micro_batch=MICRO_BATCH, shuffle=False, exact=True, optimization=pl.Optimization(train_mode=False))
        .devices(num_workers)
        .run()
    )
    return digest(handle.join().model)


def ddp() -> str:
    models = [build_model(build, torch.device("cpu"), SEED) for _ in range(REPLICAS)]
    optimizers = [sgd(model.parameters()) for model in models]
    with pl.Ddp.wrap(models, exact=True) as replicas:
        for step in range(NUM_STEPS):
            for i, model in enumerate(models):
                x, y = PAIRS[(step * REPLICAS + i) % len(PAIRS)]
                functional.cross_entropy(model(x), y).backward()
            replicas.all_reduce_gradients()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return digest(models[1].state_dict())


def functional_form() -> str:
    with pl.compat.resnetimagenet.prepare_training(
        build, (X, Y), ["cpu"] * REPLICAS, sgd, MICRO_BATCH, epochs=EPOCHS, shuffle=False, seed=SEED, exact=True,
        optimization=pl.Optimization(train_mode=False),
    ) as state:  # fmt: skip
        pl.compat.resnetimagenet.train(functional.cross_entropy, state)
        return digest(state.models[1].state_dict())


def test_five_interfaces_one_result(pool: WorkerPool) -> None:
    expected = setup()
    results = {"dp_train": dp_train(), "builder": builder(), "Ddp": ddp(), "functional": functional_form()}
    assert results == dict.fromkeys(results, expected)
    # And on two workers, where an interface has them.
    assert pool.run(setup, 2) == pool.run(dp_train, 2) == [expected] * 2
    assert builder(num_workers=2) == expected
