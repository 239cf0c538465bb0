"""What users do with autograd: hooks, torch.func, several backward calls, derivatives of derivatives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

import paceline as pl
from programs.program import (
    EQUAL,
    Program,
    adamw,
    class_loss,
    equal_or_refused,
    refused,
    small,
    usual_loop,
    usual_plain_loop,
)


def each(trainer: pl.Trainer, program: Program, act: Callable[[pl.Trainer, Any], object]) -> None:
    """The usual loop with a backward of the user's."""
    for epoch in trainer.epochs(program.epochs):
        for batch in epoch:
            act(trainer, batch)
            trainer.step()


# ---- hooks


def doubled_gradients() -> nn.Module:
    """A tensor hook on a parameter, and full backward hooks on modules that change what passes."""
    model = small()
    model[0].weight.register_hook(lambda gradient: 2 * gradient)
    model[2].register_full_backward_hook(lambda _, gradient, __: (gradient[0] * 0.5,))
    return model


def hooked_forward() -> nn.Module:
    model = small()
    model[0].register_forward_pre_hook(lambda _, inputs: (inputs[0] * 1.5,))
    model[1].register_forward_hook(lambda _, __, output: output + 0.1)
    return model


def counted(trainer: pl.Trainer, program: Program) -> Mapping[str, Any]:
    """A hook that looks at each parameter's gradient when it has come."""
    seen = []

    def look(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        seen.append(float(parameter.grad.norm()))

    for parameter in trainer.model.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    usual_loop(trainer, program)
    assert all(norm > 0 for norm in seen)
    return {}


class ReverseGradient(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -0.3 * gradient


def adversarial(model: Any, batch: Any) -> torch.Tensor:
    hidden = model[1](model[0](batch.x))
    domain = model[2](ReverseGradient.apply(hidden))
    return functional.cross_entropy(model[2](hidden), batch.y) + domain.square().mean()


# ---- torch.func


def by_functional_call(model: Any, batch: Any) -> torch.Tensor:
    parameters = dict(model.named_parameters())
    return functional.cross_entropy(functional_call(model, parameters, (batch.x,)), batch.y)


def by_vmap(model: Any, batch: Any) -> torch.Tensor:
    """Every sample by itself."""
    parameters = dict(model.named_parameters())
    outputs = vmap(lambda x: functional_call(model, parameters, (x,)))(batch.x)
    return functional.cross_entropy(outputs, batch.y)


def per_sample(model: Any, batch: Any) -> torch.Tensor:
    """Gradients of every sample weight its loss: those with large ones count less."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, batch.x, batch.y)
    norms = sum(g.flatten(1).square().sum(1) for g in gradients.values()).sqrt()
    return (functional.cross_entropy(model(batch.x), batch.y, reduction="none") / (1 + norms)).mean()


def assigned(trainer: pl.Trainer, program: Program) -> None:
    """Gradients of torch.func, put into p.grad without any backward."""
    model = trainer.model

    def act(_: pl.Trainer, batch: Any) -> None:
        def loss(parameters: Any) -> torch.Tensor:
            return functional.cross_entropy(functional_call(model, parameters, (batch.x,)), batch.y)

        gradients = grad(loss)(dict(model.named_parameters()))
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name].detach()

    each(trainer, program, act)


# ---- derivatives of derivatives


def penalty(model: Any, batch: Any) -> torch.Tensor:
    """WGAN-GP's: the norm of the gradient with respect to the input."""
    x = batch.x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return class_loss(model, batch) + (slope.norm(dim=1) - 1).square().mean()


def double_backward(model: Any, batch: Any) -> torch.Tensor:
    """The gradient of each sample's gradient with respect to a parameter: a mean over samples all the same."""
    total = class_loss(model, batch)
    outputs = model(batch.x).square().sum(1)
    slopes = [torch.autograd.grad(o, model[2].bias, create_graph=True, retain_graph=True)[0] for o in outputs]
    return total + torch.stack(slopes).square().sum(1).mean()


def one_step_ahead(model: Any, batch: Any) -> torch.Tensor:
    """MAML: the loss after a step of its own, sample by sample."""
    parameters = dict(model.named_parameters())

    def after(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        def loss(p: Any) -> torch.Tensor:
            return functional.cross_entropy(functional_call(model, p, (x[None],)), y[None])

        gradients = grad(loss)(parameters)
        return loss({name: p - 0.1 * gradients[name] for name, p in parameters.items()})

    return vmap(after)(batch.x, batch.y).mean()


# ---- several backward calls


def halves(trainer: pl.Trainer, program: Program) -> None:
    def act(trainer: pl.Trainer, batch: Any) -> None:
        trainer.backward(0.25 * program.loss(trainer.model, batch))
        trainer.backward(0.75 * program.loss(trainer.model, batch))

    each(trainer, program, act)


def bare(trainer: pl.Trainer, program: Program) -> None:
    each(trainer, program, lambda trainer, batch: program.loss(trainer.model, batch).backward())


def bare_retained(trainer: pl.Trainer, program: Program) -> None:
    def act(trainer: pl.Trainer, batch: Any) -> None:
        loss = program.loss(trainer.model, batch)
        (0.25 * loss).backward(retain_graph=True)
        (0.75 * loss).backward()

    each(trainer, program, act)


def bare_by_autograd(trainer: pl.Trainer, program: Program) -> None:
    each(trainer, program, lambda trainer, batch: torch.autograd.backward([program.loss(trainer.model, batch)]))


def retained(trainer: pl.Trainer, program: Program) -> None:
    def act(trainer: pl.Trainer, batch: Any) -> None:
        loss = program.loss(trainer.model, batch)
        trainer.backward(0.25 * loss, retain_graph=True)
        trainer.backward(0.75 * loss)

    each(trainer, program, act)


def with_graph(trainer: pl.Trainer, program: Program) -> None:
    each(trainer, program, lambda trainer, batch: program.loss(trainer.model, batch).backward(create_graph=True))


def nan_loss(model: Any, batch: Any) -> torch.Tensor:
    return class_loss(model, batch) * float("nan")


def no_losses(model: Any, made: Any, program: Program) -> Mapping[str, Any]:
    """A bare backward keeps the loss from the run."""
    return {"loss": [float("nan") for _ in usual_plain_loop(model, made, program)["loss"]]}


# ---- around the loop


def profiled(trainer: pl.Trainer, program: Program) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        usual_loop(trainer, program)
    assert profiler.key_averages()


def watched(trainer: pl.Trainer, program: Program) -> None:
    with torch.autograd.set_detect_anomaly(True):
        usual_loop(trainer, program)


def metrics(trainer: pl.Trainer, program: Program) -> None:
    """Outputs of the model without gradients, before and after backward, in eval mode and back."""

    def act(trainer: pl.Trainer, batch: Any) -> None:
        with torch.no_grad():
            trainer.model.eval()(batch.x)
            trainer.model.train()
        trainer.backward(program.loss(trainer.model, batch))
        with torch.inference_mode():
            trainer.model(batch.x)

    each(trainer, program, act)


def hidden_gradient(trainer: pl.Trainer, program: Program) -> None:
    """Saliency: the input's gradient, read after backward."""

    def act(trainer: pl.Trainer, batch: Any) -> None:
        x = batch.x.clone().requires_grad_()
        trainer.backward(functional.cross_entropy(trainer.model(x), batch.y))
        assert x.grad is not None
        assert x.grad.abs().sum() > 0

    each(trainer, program, act)


class Elsewhere:
    """A model that the trainer does not know."""

    model = small()


PROGRAMS: dict[str, Program] = {
    "backward hooks": Program(EQUAL, build=doubled_gradients),
    "forward hooks": Program(EQUAL, build=hooked_forward),
    "hooks when a gradient has come": Program(EQUAL, loop=counted),
    "an autograd function of one's own": Program(EQUAL, loss=adversarial),
    "functional_call": Program(EQUAL, loss=by_functional_call),
    "vmap": Program(EQUAL, loss=by_vmap),
    "per-sample gradients": Program(EQUAL, loss=per_sample),
    "gradients assigned by hand": Program(
        equal_or_refused(r"step\(\) was called before backward\(\)|gradient.*(changed|modified|replaced)"),
        loop=assigned,
        plain_loop=no_losses,
    ),
    "gradient penalty": Program(EQUAL, loss=penalty, optimizer=adamw),
    "double backward": Program(EQUAL, loss=double_backward),
    "a step ahead, as in MAML": Program(EQUAL, loss=one_step_ahead),
    "several backward calls": Program(EQUAL, loop=halves),
    "bare loss.backward()": Program(EQUAL, loop=bare, plain_loop=no_losses),
    "bare torch.autograd.backward": Program(EQUAL, loop=bare_by_autograd, plain_loop=no_losses),
    "bare backward(retain_graph=True)": Program(EQUAL, loop=bare_retained, plain_loop=no_losses),
    "trainer.backward(retain_graph=True)": Program(equal_or_refused(r"retain_graph=True"), loop=retained),
    "bare backward(create_graph=True)": Program(
        equal_or_refused(r"create_graph=True"), loop=with_graph, plain_loop=no_losses
    ),
    "a profiler around the loop": Program(EQUAL, loop=profiled),
    "anomaly detection": Program(EQUAL, loop=watched),
    "outputs without gradients in the loop": Program(EQUAL, loop=metrics),
    "the input's gradient": Program(EQUAL, loop=hidden_gradient),
    "a loss that is no scalar": Program(
        refused(r"the loss has shape \(4, 4\): it must be one number"), loss=lambda model, batch: model(batch.x)
    ),
    "a loss that is a float": Program(
        refused(r"the loss is a float: it must be a tensor"), loss=lambda model, batch: class_loss(model, batch).item()
    ),
    "a loss without gradient": Program(
        refused(r"(loss|element 0 of tensors) does not require (a )?grad"),
        loss=lambda model, batch: class_loss(model, batch).detach(),
    ),
    "a loss of another model": Program(
        refused(r"no trained parameter a gradient: compute the loss with trainer\.model"),
        loss=lambda _, batch: class_loss(Elsewhere.model, batch),
    ),
    "a loss that is NaN": Program(refused(r"NonFiniteError: .*nan"), loss=nan_loss),
}
