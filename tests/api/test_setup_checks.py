"""What set-up does to a model, and which models, optimizers and schedulers it takes or refuses by name."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from grouping import grouped
from models import digest, mlp, vectors
from torch import nn
from torch.nn import functional
from worker_pool import WorkerPool

import paceline as pl

X, Y = vectors(24)
StepLR = torch.optim.lr_scheduler.StepLR


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def setup(model: Any = mlp, optimizer: Any = sgd, **settings: Any) -> pl.Trainer:
    settings = {"data": (X, Y), "global_batch": 8, "micro_batch": 4, "timeout_s": 60, **settings}
    return pl.Trainer.setup(model, optimizer, **grouped(**settings))


def train(trainer: pl.Trainer, epochs: int = 1, **backward: Any) -> list[float]:
    losses: list[float] = []
    trainer.every(1, lambda record: losses.append(record.loss))
    for epoch in trainer.epochs(epochs):
        for batch in epoch:
            trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y), **backward)
            trainer.step()
    return losses


# Training mode.


class Dropping(nn.Module):
    """As `from_pretrained` returns it: in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)

    def compute_loss(self, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(self(batch.x), batch.y)


def modes_of(model: nn.Module) -> set[bool]:
    return {module.training for module in model.modules()}


def through_setup(**settings: Any) -> set[bool]:
    with setup(Dropping, **settings) as trainer:
        return modes_of(trainer.model)


def through_setup_head(**settings: Any) -> set[bool]:
    with pl.Trainer.setup_head(Dropping(), sgd, data=(X, Y), global_batch=8, **grouped(**settings)) as trainer:
        return modes_of(trainer.model)


def through_builder(**settings: Any) -> set[bool]:
    seen: list[set[bool]] = []

    def loss(model: Any, batch: Any) -> torch.Tensor:
        seen.append(modes_of(model))
        return functional.cross_entropy(model(batch.x), batch.y)

    pl.Trainer.builder(Dropping, sgd, loss).dataset((X, Y)).batch_size(8).num_epochs(1).devices(1).settings(
        micro_batch=4, **grouped(**settings)
    ).run().join()
    return set.union(*seen)


def through_dp_train(**settings: Any) -> set[bool]:
    data = [(X[i : i + 8], Y[i : i + 8]) for i in (0, 8, 16)]
    result = pl.dp_train(
        Dropping,
        data,
        functional.cross_entropy,
        lambda model, sample: model(sample[0]),
        lambda sample: sample[1],
        n_gpu=2,
        n_iter=2,
        verbose=False,
        **grouped(**settings),
    )
    return modes_of(result.model)


def through_functions(**settings: Any) -> set[bool]:
    with pl.compat.resnetimagenet.prepare_training(
        Dropping, (X, Y), ["cpu", "cpu"], sgd, nsamples=4, **grouped(**settings)
    ) as state:
        return set.union(*map(modes_of, state.models))


THROUGH = [through_setup, through_setup_head, through_builder, through_dp_train, through_functions]


@pytest.mark.parametrize("through", THROUGH, ids=lambda f: f.__name__)
def test_set_up_puts_the_model_into_training_mode_unless_told_otherwise(through: Any) -> None:
    assert through() == {True}
    assert through(train_mode=False) == {False}


def test_a_pretrained_model_trains_with_its_dropout() -> None:
    """In evaluation mode two passes over one micro-batch would give the same loss."""
    with pl.Trainer.setup_head(Dropping(), sgd, data=(X, Y), global_batch=8) as trainer:
        for batch in next(trainer.epochs(1)):
            first, second = trainer.loss(batch), trainer.loss(batch)
            assert first.item() != second.item()
            trainer.backward(first)
            trainer.step()


def test_replicas_in_the_users_hands_keep_their_mode() -> None:
    models = [Dropping(), Dropping().train()]
    with pl.Ddp.wrap(models):
        assert [modes_of(model) for model in models] == [{False}, {True}]


def test_layers_may_be_kept_in_evaluation_mode() -> None:
    class KeepsItsNormFrozen(Dropping):
        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            self.body[1].eval()
            return self

    with setup(KeepsItsNormFrozen) as trainer:
        assert [module.training for module in trainer.model.body] == [True, False, True, True]
    with setup(Dropping) as trainer:
        trainer.model.body[1].eval()
        train(trainer)
        assert trainer.model.body[1].num_batches_tracked == 0


# Models that exchange by themselves.


def test_a_wrapped_model_is_refused(pool: WorkerPool) -> None:
    def run() -> list[str]:
        texts = []
        for wrapped in (nn.parallel.DistributedDataParallel(mlp()), nn.Sequential(nn.DataParallel(mlp()))):
            with pytest.raises(pl.errors.MisuseError) as raised:
                setup(wrapped, shares=[2, 1, 0][: dist.get_world_size()])
            texts.append(str(raised.value))
        return texts

    for size in (2, 3):
        for ddp, parallel in pool.run(run, size):
            assert ddp.startswith("the model is a DistributedDataParallel, which exchanges or divides by itself")
            assert ddp.endswith("give the model that it wraps (its .module). Paceline does the exchange")
            assert parallel.startswith("its module '0' is a DataParallel")


def test_a_wrapped_model_is_refused_on_one_worker_and_by_every_entry() -> None:
    wrapped = nn.DataParallel(mlp())
    with pytest.raises(pl.errors.MisuseError, match="the model is a DataParallel"):
        setup(wrapped)
    with pytest.raises(pl.errors.MisuseError, match="the model is a DataParallel"):
        pl.compat.resnetimagenet.prepare_training(wrapped, (X, Y), ["cpu"], sgd, nsamples=4)
    with pytest.raises(pl.errors.MisuseError, match="the model is a DataParallel"):
        pl.Ddp.wrap([wrapped, nn.DataParallel(mlp())])


def test_a_sharded_model_is_refused(pool: WorkerPool) -> None:
    def run() -> list[str]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

        mesh = init_device_mesh("cpu", (2,))
        sharded = mlp()
        fully_shard(sharded, mesh=mesh)
        texts = []
        for model in (FullyShardedDataParallel(mlp(), device_id=torch.device("cpu")), sharded):
            with pytest.raises(pl.errors.MisuseError) as raised:
                setup(model)
            texts.append(str(raised.value))
        return texts

    for wrapped, sharded in pool.run(run, 2):
        assert wrapped.startswith("the model is a FullyShardedDataParallel, which exchanges or divides by itself")
        assert sharded.startswith("parameter '0.weight' is a ")
        assert "sharded over devices by fully_shard" in sharded


# Optimizers and schedulers.


def test_a_class_of_torch_makes_an_optimizer_with_its_defaults() -> None:
    with setup(optimizer=torch.optim.AdamW) as trainer:
        train(trainer)
        assert trainer.optimizer.param_groups[0]["lr"] == 1e-3


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    with pytest.raises(TypeError, match=r"optimizer is a LBFGS, whose step\(closure\) computes the loss several times"):
        setup(optimizer=lambda p: torch.optim.LBFGS(p))


def test_a_scheduler_that_exists_is_taken_with_its_optimizer() -> None:
    def run(model: nn.Module, by_factory: bool) -> tuple[str, float]:
        optimizer = sgd(model.parameters())
        made = (lambda o: StepLR(o, 2, 0.5)) if by_factory else StepLR(optimizer, 2, 0.5)
        with setup(model, optimizer, scheduler=made) as trainer:
            train(trainer, 2)
            return digest(model.state_dict()), trainer.optimizer.param_groups[0]["lr"]

    model = mlp()
    assert run(copy.deepcopy(model), by_factory=True) == run(copy.deepcopy(model), by_factory=False)


def test_a_scheduler_over_another_optimizer_is_refused() -> None:
    other = StepLR(sgd(mlp().parameters()), 2)
    message = r"scheduler is a StepLR over another optimizer than the run's: pass a function, such as lambda optimizer:"
    with pytest.raises(TypeError, match=message):
        setup(scheduler=other)
    with pytest.raises(TypeError, match=r"scheduler made a float without step\(\): pass a function from the optimizer"):
        setup(scheduler=lambda _: 0.1)
    with pytest.raises(TypeError, match=r"scheduler is a float without step\(\): pass a function from the optimizer"):
        setup(scheduler=0.1)


def test_an_optimizer_can_be_used_again_after_a_set_up_that_failed() -> None:
    model = mlp()
    optimizer = sgd(model.parameters())
    with pytest.raises(TypeError, match=r"scheduler is a float without step\(\)"):
        setup(model, optimizer, scheduler=0.1)
    with setup(model, optimizer) as trainer:
        train(trainer, 1)
    optimizer.step()


def test_a_plateau_scheduler_needs_the_loss() -> None:
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    message = r"ReduceLROnPlateau needs the loss, which is unknown after a bare loss.backward\(\): call trainer.bac"
    with setup(scheduler=plateau) as trainer, pytest.raises(pl.errors.MisuseError, match=message):
        for batch in next(trainer.epochs(1)):
            functional.cross_entropy(trainer.model(batch.x), batch.y).backward()
            trainer.step()


# Parameters that a load replaces.


@pytest.mark.parametrize("part", [False, True], ids=["model", "layer"])
def test_loading_by_assignment_is_refused_with_the_parameters_name(part: bool) -> None:
    state = mlp().state_dict()
    with setup(mlp()) as trainer:
        trainer.model.load_state_dict(state)
        train(trainer)
        loads = trainer.model[0] if part else trainer.model
        own = {name.removeprefix("0."): value for name, value in state.items() if name.startswith("0.")}
        message = r"load_state_dict\(assign=True\) replaced parameter '0.weight' of the model that is trained"
        with pytest.raises(pl.errors.MisuseError, match=message):
            loads.load_state_dict(own if part else state, assign=True)
        model = trainer.model
    model.load_state_dict(state, assign=True)  # the run is over


def test_a_model_in_training_can_be_copied_and_pickled() -> None:
    with setup(mlp()) as trainer:
        train(trainer)
        for other in (copy.deepcopy(trainer.model), pickle.loads(pickle.dumps(trainer.model))):
            assert digest(other.state_dict()) == digest(trainer.model.state_dict())
            other.load_state_dict(mlp().state_dict(), assign=True)


# Arguments of backward.


@pytest.mark.parametrize("settings", [{}, {"global_batch": 4}, {"exact": True}], ids=["buckets", "direct", "exact"])
def test_a_graph_may_be_kept_for_a_second_backward(settings: dict[str, Any]) -> None:
    def run(model: nn.Module, twice: bool) -> str:
        with setup(model, **settings) as trainer:
            for batch in next(trainer.epochs(1)):
                loss = functional.cross_entropy(trainer.model(batch.x), batch.y)
                if twice:
                    trainer.backward(loss, retain_graph=True)
                    trainer.backward(loss)
                else:
                    trainer.backward(2 * loss)
                trainer.step()
            return digest({name: p.round(decimals=4) for name, p in model.state_dict().items()})

    model = mlp()
    assert run(copy.deepcopy(model), twice=True) == run(copy.deepcopy(model), twice=False)


def test_a_graph_of_the_gradients_is_refused() -> None:
    with (
        setup() as trainer,
        pytest.raises(pl.errors.MisuseError, match=r"for a gradient penalty call torch.autograd.grad"),
    ):
        train(trainer, create_graph=True)


# A trainer that is closed.


def test_a_closed_trainer_refuses_to_train() -> None:
    trainer = setup()
    epochs = trainer.epochs(2)
    epoch = next(epochs)
    trainer.close()
    trainer.close()
    message = "this trainer is closed, its run has ended: call Trainer.setup again"
    for attempt in (
        lambda: iter(epoch),
        lambda: next(epochs),
        lambda: next(trainer.epochs(1)),
        lambda: trainer.backward(torch.zeros(1)),
        trainer.step,
        lambda: trainer.evaluate((X, Y), lambda m, b: m(b.x).mean()),
        lambda: trainer.gather(1),
    ):
        with pytest.raises(pl.errors.MisuseError, match=message):
            attempt()
    assert trainer.position.step == 0


def test_a_trainer_closed_in_its_own_loop_says_so() -> None:
    trainer = setup(global_batch=4)
    with pytest.raises(pl.errors.MisuseError, match="this trainer is closed"):
        for batch in next(trainer.epochs(1)):
            trainer.close()
            trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))


# Registered objects without checkpoints.


def test_an_object_may_be_registered_in_a_run_that_is_not_saved() -> None:
    with setup() as trainer:
        trainer.register("early_stopping", pl.EarlyStopping())
        with pytest.raises(ValueError, match="'early_stopping' is taken"):
            trainer.register("early_stopping", pl.EarlyStopping())
        with pytest.raises(TypeError, match="'x' is a int: it needs state_dict"):
            trainer.register("x", 3)  # type: ignore[arg-type]
        train(trainer)
        assert trainer.state_components() == {}
