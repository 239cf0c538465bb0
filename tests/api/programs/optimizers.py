"""Optimizers, schedulers, averages of the weights, and what users do to gradients and learning rates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from grouping import grouped
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import paceline as pl
from programs.program import (
    EQUAL,
    Program,
    adamw,
    all_settings,
    as_list,
    class_loss,
    copy_of,
    equal_or_refused,
    equal_to,
    gradients,
    refused,
    sgd,
    small,
    usual_loop,
    usual_plain_loop,
    weights_of,
)


def muon_and_adamw(params: list[torch.Tensor]) -> list[torch.optim.Optimizer]:
    matrices, rest = [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.01), adamw(rest)]


def two(params: list[torch.Tensor]) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(params[:2], lr=0.1, momentum=0.9, nesterov=True), adamw(params[2:])]


class SignDescent(torch.optim.Optimizer):
    """An optimizer of the user's own, after the docs of torch."""

    def __init__(self, params: Any, lr: float = 0.01, decay: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 1 - group["decay"])
                parameter.add_(torch.tanh(mean * 10), alpha=-group["lr"])


def groups(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    decayed = {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1}
    return torch.optim.AdamW([decayed, {"params": [p for p in params if p.ndim < 2], "lr": 0.02}], lr=0.01, eps=1e-3)


def warm_up(optimizer: Any) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))


def warm_up_then_cosine(optimizer: Any) -> Any:
    first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [first, lr_scheduler.CosineAnnealingLR(optimizer, 4)], [2])


# ---- what is done after every step, on all workers alike


def rate_by_hand(_: Any, optimizer: Any, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.1 / (1 + step)


def other_momentum(_: Any, optimizer: Any, step: int) -> None:
    for group in optimizer.param_groups:
        group["momentum"], group["weight_decay"] = 0.5 + 0.05 * step, 0.01 * step


def forget(_: Any, optimizer: Any, step: int) -> None:
    if step == 3:
        optimizer.state.clear()


def reload(_: Any, optimizer: Any, step: int) -> None:
    if step == 3:
        optimizer.load_state_dict(optimizer.state_dict())


def halve(parameters: Mapping[str, torch.Tensor]) -> None:
    for parameter in parameters.values():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def clip_values(parameters: Mapping[str, torch.Tensor]) -> None:
    nn.utils.clip_grad_value_(parameters.values(), 0.01)


# ---- what is done in the loop's body, which a worker without a share does not run


def body(trainer: pl.Trainer, program: Program, act: Callable[[pl.Trainer], object], *, when: str) -> None:
    """The usual loop with `act(trainer)` before backward, between backward and step, or after a complete step."""
    for epoch in trainer.epochs(program.epochs):
        for batch in epoch:
            if when == "before":
                act(trainer)
            trainer.backward(program.loss(trainer.model, batch))
            if when == "between":
                act(trainer)
            if trainer.step() and when == "after":
                act(trainer)


def scheduler_in_the_loop(trainer: pl.Trainer, program: Program) -> None:
    scheduler = lr_scheduler.StepLR(trainer.optimizer, 1, 0.5)
    body(trainer, program, lambda _: scheduler.step(), when="after")


def scheduler_left_in(trainer: pl.Trainer, program: Program) -> None:
    """The trainer has it, and the loop steps it, too."""
    body(trainer, program, lambda trainer: trainer.scheduler.step(), when="after")


def halving(model: Any, made: Any, program: Program) -> Mapping[str, Any]:
    scheduler = lr_scheduler.StepLR(made, 1, 0.5)
    return usual_plain_loop(model, made, with_after(program, lambda *_: scheduler.step()))


def with_after(program: Program, act: Callable[[Any, Any, int], object]) -> Program:
    return Program(program.expect, loss=program.loss, batches=program.batches, epochs=program.epochs, after_step=act)


def rates_in_the_loop(trainer: pl.Trainer) -> None:
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.1 / (1 + trainer.position.step)


def rates(model: Any, made: Any, program: Program) -> Mapping[str, Any]:
    return usual_plain_loop(model, made, with_after(program, rate_by_hand))


def set_lr(trainer: pl.Trainer, program: Program) -> None:
    trainer.every(1, lambda record: trainer.set_lr(0.1 / (1 + record.step)))
    usual_loop(trainer, program)


def momentum_in_the_loop(trainer: pl.Trainer) -> None:
    trainer.optimizer.param_groups[0]["momentum"] = 0.5


def clip(trainer: pl.Trainer) -> None:
    nn.utils.clip_grad_norm_(trainer.model.parameters(), 0.1)


def scale(trainer: pl.Trainer) -> None:
    for parameter in trainer.model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def add_noise(trainer: pl.Trainer) -> None:
    for parameter in trainer.model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad + 0.01 * torch.randn_like(parameter)


def drop_gradients(trainer: pl.Trainer) -> None:
    """Of some parameters, as a way to freeze them."""
    trainer.model[0].weight.grad = None


def look(trainer: pl.Trainer, program: Program) -> None:
    """Gradients are logged after every backward."""

    def norms(trainer: pl.Trainer) -> None:
        for name, parameter in trainer.model.named_parameters():
            assert parameter.grad is not None, f"p.grad of {name} is None after backward"
            assert parameter.grad.shape == parameter.shape
            assert 0 < float(parameter.grad.norm()) < 1e6, f"p.grad of {name} is {parameter.grad}"

    body(trainer, program, norms, when="between")


def zero(trainer: pl.Trainer, program: Program, *, set_to_none: bool, when: str) -> None:
    body(trainer, program, lambda trainer: trainer.optimizer.zero_grad(set_to_none=set_to_none), when=when)


def zero_by_model(trainer: pl.Trainer, program: Program) -> None:
    body(trainer, program, lambda trainer: trainer.model.zero_grad(), when="before")


def step_left_in(trainer: pl.Trainer, program: Program) -> None:
    body(trainer, program, lambda trainer: trainer.optimizer.step(), when="between")


def step_left_in_after(trainer: pl.Trainer, program: Program) -> None:
    body(trainer, program, lambda trainer: trainer.optimizer.step(), when="after")


def grad_scaler(trainer: pl.Trainer, program: Program) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for epoch in trainer.epochs(program.epochs):
        for batch in epoch:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = program.loss(trainer.model, batch)
            scaler.scale(loss).backward()
            scaler.step(trainer.optimizer)
            scaler.update()
            trainer.step()


def grad_scaler_and_trainer(trainer: pl.Trainer, program: Program) -> None:
    """The scaled loss goes to the trainer."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for epoch in trainer.epochs(program.epochs):
        for batch in epoch:
            trainer.backward(scaler.scale(program.loss(trainer.model, batch)))
            scaler.unscale_(trainer.optimizer)
            trainer.step()


def bare(trainer: pl.Trainer, program: Program) -> None:
    for epoch in trainer.epochs(program.epochs):
        for batch in epoch:
            with trainer.autocast():
                loss = program.loss(trainer.model, batch)
            loss.backward()
            trainer.step()


def autocast(trainer: pl.Trainer, program: Program) -> None:
    for epoch in trainer.epochs(program.epochs):
        for batch in epoch:
            with trainer.autocast():
                loss = program.loss(trainer.model, batch)
            trainer.backward(loss)
            trainer.step()


# ---- averages of the weights


def ema_of_paceline(trainer: pl.Trainer, program: Program) -> Mapping[str, Any]:
    usual_loop(trainer, program)
    with trainer.ema_weights():
        return {f"average of {name}": value for name, value in weights_of(trainer.model).items()}


def plain_ema(model: Any, made: Any, program: Program) -> Mapping[str, Any]:
    average = copy_of(model)

    def update(model: Any, *_: Any) -> None:
        for kept, parameter in zip(average.parameters(), model.parameters(), strict=True):
            kept.lerp_(parameter.detach(), 0.25)

    losses = usual_plain_loop(model, made, with_after(program, update))
    return {**losses, **{f"average of {name}": value for name, value in weights_of(average).items()}}


def ema_by_hand(trainer: pl.Trainer, program: Program) -> Mapping[str, Any]:
    average = AveragedModel(trainer.model, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    trainer.every(1, lambda _: average.update_parameters(trainer.model))
    usual_loop(trainer, program)
    return {f"average of {name}": value for name, value in weights_of(average.module).items()}


def plain_ema_by_hand(model: Any, made: Any, program: Program) -> Mapping[str, Any]:
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    after = with_after(program, lambda model, *_: average.update_parameters(model))
    losses = usual_plain_loop(model, made, after)
    return {**losses, **{f"average of {name}": value for name, value in weights_of(average.module).items()}}


# ---- optimizers and schedulers that exist before the trainer


def given_optimizer(program: Program, given: dict[str, Any]) -> Mapping[str, Any]:
    model, losses = program.make(), []
    with pl.Trainer.setup(
        model, program.optimizer(model.parameters()), **grouped(**all_settings(program, given))
    ) as trainer:
        trainer.every(1, lambda record: losses.append(record.loss))
        usual_loop(trainer, program)
    return {"loss": losses, **weights_of(model)}


def given_scheduler(program: Program, given: dict[str, Any]) -> Mapping[str, Any]:
    model = program.make()
    optimizer = program.optimizer(model.parameters())
    settings = all_settings(program, given)
    settings["scheduler"] = warm_up(optimizer)
    losses: list[float] = []
    with pl.Trainer.setup(model, optimizer, **grouped(**settings)) as trainer:
        trainer.every(1, lambda record: losses.append(record.loss))
        usual_loop(trainer, program)
    return {"loss": losses, **weights_of(model)}


def with_warm_up(model: Any, made: Any, program: Program) -> Mapping[str, Any]:
    scheduler = warm_up(made)
    return usual_plain_loop(model, made, with_after(program, lambda *_: scheduler.step()))


def counted_steps(trainer: pl.Trainer, program: Program) -> Mapping[str, Any]:
    """By a hook of torch's on the optimizer."""
    count: list[int] = []
    trainer.optimizer.register_step_post_hook(lambda *_: count.append(1))
    usual_loop(trainer, program)
    return {"steps": [len(count)]}


def plain_counted_steps(model: Any, made: Any, program: Program) -> Mapping[str, Any]:
    count: list[int] = []
    made.register_step_post_hook(lambda *_: count.append(1))
    return {**usual_plain_loop(model, made, program), "steps": [len(count)]}


def by_autocast(dtype: torch.dtype) -> Callable[[Any, Any, Program], Mapping[str, Any]]:
    def loop(model: Any, made: Any, program: Program) -> Mapping[str, Any]:
        losses = []
        for epoch in range(program.epochs):
            for batch in program.batches(epoch):
                made.zero_grad()
                with torch.autocast("cpu", dtype=dtype):
                    losses.append(gradients(model, batch, program, len(losses)))
                made.step()
        return {"loss": losses}

    return loop


CHANGED = r"gradient.*(changed|modified|replaced).*max_grad_norm.*on_gradients"
OWNED = r"SGD\.step\(\) was called on an optimizer that belongs to the trainer.*trainer\.step\(\) does it"
DIFFERENT_RATES = r"'lr' in group 0 of SGD is \S+ on rank 2 and \S+ on rank 0: .*scheduler=.*set_lr"
A_WORKER_IDLE = refused(DIFFERENT_RATES)


def one_optimizer(make: Callable[..., torch.optim.Optimizer], **settings: Any) -> Program:
    return Program(EQUAL, optimizer=partial(make, **settings), build=small)


PROGRAMS: dict[str, Program] = {
    "Muon with AdamW": Program(EQUAL, optimizer=muon_and_adamw),
    "two optimizers": Program(EQUAL, optimizer=two),
    "two optimizers and schedulers": Program(
        EQUAL, optimizer=two, scheduler=lambda both: [lr_scheduler.StepLR(o, 2, 0.5) for o in as_list(both)]
    ),
    "an optimizer of one's own": Program(EQUAL, optimizer=SignDescent),
    "an optimizer's class": Program(EQUAL, optimizer=torch.optim.SGD),
    "an optimizer that exists": Program(EQUAL, whole=given_optimizer),
    "parameter groups": Program(EQUAL, optimizer=groups),
    "an optimizer over some of the parameters": Program(EQUAL, optimizer=lambda params: sgd(list(params)[2:])),
    "LBFGS": Program(refused(r"LBFGS.*closure"), optimizer=torch.optim.LBFGS),
    "SGD, maximize": one_optimizer(torch.optim.SGD, lr=0.01, maximize=True),
    "SGD, not fused": one_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5, foreach=False),
    "SGD, rate in a tensor": one_optimizer(torch.optim.SGD, lr=torch.tensor(0.1)),
    "Adam, amsgrad": one_optimizer(torch.optim.Adam, lr=0.01, amsgrad=True, eps=1e-3),
    "Adagrad": one_optimizer(torch.optim.Adagrad, lr=0.05, eps=1e-3),
    "RMSprop": one_optimizer(torch.optim.RMSprop, lr=0.01, momentum=0.9, centered=True, eps=1e-3),
    "NAdam": one_optimizer(torch.optim.NAdam, lr=0.01, eps=1e-3),
    "RAdam": one_optimizer(torch.optim.RAdam, lr=0.01, eps=1e-3),
    "Adafactor": one_optimizer(torch.optim.Adafactor, lr=0.01),
    "ASGD": one_optimizer(torch.optim.ASGD, lr=0.01, t0=2),
    "warm-up": Program(EQUAL, scheduler=warm_up),
    "OneCycleLR": Program(EQUAL, scheduler=lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=6)),
    "warm-up, then cosine": Program(EQUAL, scheduler=warm_up_then_cosine),
    "plateau scheduler": Program(
        EQUAL, scheduler=lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.1)
    ),
    "a scheduler's object": Program(
        equal_or_refused(r"scheduler is a LambdaLR.*(function|lambda)"), whole=given_scheduler, plain_loop=with_warm_up
    ),
    "scheduler.step() in the loop": Program(
        (EQUAL, EQUAL, A_WORKER_IDLE), loop=scheduler_in_the_loop, plain_loop=halving
    ),
    "scheduler.step() left in": Program(
        refused(r"LambdaLR\.step\(\) was called on a scheduler that belongs to the trainer|'lr' in group 0 of SGD"),
        loop=scheduler_left_in,
        scheduler=warm_up,
    ),
    "rates set in the loop": Program(
        (EQUAL, EQUAL, A_WORKER_IDLE),
        loop=lambda trainer, program: body(trainer, program, rates_in_the_loop, when="after"),
        plain_loop=rates,
    ),
    "momentum set in the loop": Program(
        (EQUAL, EQUAL, refused(r"'momentum' in group 0 of SGD is 0\.9 on rank 2 and 0\.5 on rank 0: .*trainer\.every")),
        loop=lambda trainer, program: body(trainer, program, momentum_in_the_loop, when="after"),
        plain_loop=lambda model, made, program: usual_plain_loop(
            model, made, with_after(program, lambda _, o, __: o.param_groups[0].update(momentum=0.5))
        ),
    ),
    "rates set after every step": Program(EQUAL, after_step=rate_by_hand),
    "trainer.set_lr": Program(EQUAL, loop=set_lr, plain_loop=rates),
    "momentum set after every step": Program(EQUAL, after_step=other_momentum),
    "an optimizer that forgets": Program(EQUAL, after_step=forget, optimizer=adamw),
    "an optimizer's state loaded on the way": Program(EQUAL, after_step=reload, optimizer=adamw),
    "a hook of the optimizer": Program(EQUAL, loop=counted_steps, plain_loop=plain_counted_steps),
    "max_grad_norm": Program(EQUAL, settings={"max_grad_norm": 0.1}),
    "gradients clipped by on_gradients": Program(EQUAL, on_gradients=clip_values),
    "gradients scaled by on_gradients": Program(EQUAL, on_gradients=halve),
    "clip_grad_norm_ in the loop": Program(
        refused(CHANGED), loop=lambda trainer, program: body(trainer, program, clip, when="between")
    ),
    "gradients scaled in the loop": Program(
        refused(CHANGED), loop=lambda trainer, program: body(trainer, program, scale, when="between")
    ),
    "noise on gradients in the loop": Program(
        refused(CHANGED), loop=lambda trainer, program: body(trainer, program, add_noise, when="between")
    ),
    "gradients dropped in the loop": Program(
        refused(CHANGED), loop=lambda trainer, program: body(trainer, program, drop_gradients, when="between")
    ),
    "gradients logged by p.grad": Program(EQUAL, loop=look),
    "zero_grad before backward": Program(EQUAL, loop=partial(zero, set_to_none=True, when="before")),
    "zero_grad(set_to_none=False) before backward": Program(
        EQUAL, loop=partial(zero, set_to_none=False, when="before")
    ),
    "zero_grad after a step": Program(EQUAL, loop=partial(zero, set_to_none=True, when="after")),
    "zero_grad(set_to_none=False) after a step": Program(EQUAL, loop=partial(zero, set_to_none=False, when="after")),
    "model.zero_grad before backward": Program(EQUAL, loop=zero_by_model),
    "optimizer.step() left in": Program(refused(OWNED), loop=step_left_in),
    "optimizer.step() left in after the step": Program(refused(OWNED), loop=step_left_in_after),
    "GradScaler": Program(refused(r"GradScaler|" + OWNED), loop=grad_scaler, settings={"precision": "fp16"}),
    "GradScaler without fp16": Program(
        refused(r"GradScaler|unscale_\(\) has already been called|" + CHANGED),
        loop=grad_scaler_and_trainer,
        loss=class_loss,
    ),
    "fp16 with a bare backward": Program(
        refused(r"fp16.*trainer\.backward"), loop=bare, settings={"precision": "fp16"}
    ),
    "fp16": Program(
        equal_to(5e-3), loop=autocast, settings={"precision": "fp16"}, plain_loop=by_autocast(torch.float16)
    ),
    "bf16": Program(
        equal_to(2e-2), loop=autocast, settings={"precision": "bf16"}, plain_loop=by_autocast(torch.bfloat16)
    ),
    "ema=": Program(EQUAL, loop=ema_of_paceline, plain_loop=plain_ema, settings={"ema": 0.75}),
    "an average by hand": Program(EQUAL, loop=ema_by_hand, plain_loop=plain_ema_by_hand, optimizer=sgd),
}
