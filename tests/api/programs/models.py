"""Models: what they are made of, and what is done to them on the way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from models import SmallResNet
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from programs.program import (
    EQUAL,
    GLOBAL_BATCH,
    Program,
    X,
    Y,
    adamw,
    copy_of,
    equal_or_refused,
    equal_to,
    refused,
    sgd,
    small,
)


class Tied(nn.Module):
    """Two layers of one weight, used twice each."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.second = nn.Linear(12, 12)
        self.second.weight = self.first.weight
        self.head = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second, self.first):
            x = torch.tanh(layer(x))
        return self.head(x)


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def frozen() -> nn.Module:
    model = small()
    model[0].requires_grad_(False)
    return model


def with_lora() -> nn.Module:
    return nn.Sequential(LoRA(nn.Linear(12, 8)), nn.Tanh(), LoRA(nn.Linear(8, 4)))


def pruned() -> nn.Module:
    model = small()
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    return model


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).T


def symmetric() -> nn.Module:
    model = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4))
    nn.utils.parametrize.register_parametrization(model[0], "weight", Symmetric())
    return model


class Counting(nn.Module):
    """Buffers of its own: how often it ran, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("mask", torch.tensor([True, False, True, True]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.body(x) * self.scale * self.mask


class Reader(nn.Module):
    """Rows as sequences of tokens, padded with zeros, through an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 6, padding_idx=0)
        self.lstm = nn.LSTM(6, 7, num_layers=2, batch_first=True)
        self.head = nn.Linear(7, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.abs().clamp(max=2).mul(2).long()
        return self.head(self.lstm(self.embed(tokens))[0][:, -1])


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = small()
        self.unused = nn.Linear(3, 3)
        self.empty = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class SometimesUsed(nn.Module):
    """An expert that few samples go to: in most micro-batches it has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small()
        self.expert = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, chosen = self.body(x), x[:, 0] > 1.2
        return y.index_add(0, chosen.nonzero()[:, 0], self.expert(x[chosen])) if chosen.any() else y


class NotAModule:
    def __init__(self) -> None:
        self.w = torch.randn(12, 4, requires_grad=True)
        self.b = torch.zeros(4, requires_grad=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w + self.b

    def parameters(self) -> list[torch.Tensor]:
        return [self.w, self.b]


class Recomputing(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(12, 8), nn.Linear(8, 4), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant:
            x = x.clone().requires_grad_()
        return self.second(checkpoint(lambda z: torch.tanh(self.first(z)), x, use_reentrant=self.reentrant))


class Mixture(nn.Module):
    """Parameters in a list, a dict and by themselves, one of them a scalar and one not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.several = nn.ParameterList([nn.Parameter(torch.randn(12, 4) / 4) for _ in range(2)])
        self.by_name = nn.ParameterDict({"bias": nn.Parameter(torch.zeros(4))})
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.turned = nn.Parameter(torch.randn(4, 12).T)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * sum(x @ w for w in [*self.several, self.turned]) + self.by_name["bias"]


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 4, dtype=torch.complex64) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(12, 12)])
        self.head = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


def grow(model: Any, optimizer: Any, step: int) -> None:
    if step in (2, 4):
        generator = torch.Generator().manual_seed(step)
        layer = nn.Linear(12, 12)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
        model.layers.append(layer)
        optimizer.add_param_group({"params": list(layer.parameters()), "lr": 0.05})


def shrink(model: Any, optimizer: Any, step: int) -> None:
    """A layer is taken out again."""
    if step == 3:
        gone = {id(p) for p in model.layers[-1].parameters()}
        del model.layers[-1]
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in gone]


def two_layers() -> nn.Module:
    model = Growing()
    model.layers.append(nn.Linear(12, 12))
    return model


def unfreeze(model: Any, optimizer: Any, step: int) -> None:
    if step == 2:
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[0].parameters())})


def freeze(model: Any, _: Any, step: int) -> None:
    if step == 2:
        model[0].requires_grad_(False)
        for parameter in model[0].parameters():
            parameter.grad = None


def freeze_and_thaw(model: Any, _: Any, step: int) -> None:
    """As adversarial and alternating training do it."""
    for parameter in model[0].parameters():
        parameter.requires_grad_(step % 2 == 0)
        parameter.grad = None


TEACHERS: dict[int, nn.Module] = {}


def distil(model: Any, batch: Any) -> torch.Tensor:
    """From a deep copy of the model, which `renew_teacher` makes anew."""
    if id(model) not in TEACHERS:
        TEACHERS[id(model)] = copy_of(model)
    target = TEACHERS[id(model)](batch.x).softmax(1)
    return functional.cross_entropy(model(batch.x), batch.y) + functional.cross_entropy(model(batch.x), target)


def renew_teacher(model: Any, _: Any, step: int) -> None:
    if step % 2 == 0:
        TEACHERS[id(model)] = copy_of(model)


def assign(model: Any, _: Any, step: int) -> None:
    if step == 2:
        model.load_state_dict({name: value.clone() / 2 for name, value in model.state_dict().items()}, assign=True)


def load(model: Any, _: Any, step: int) -> None:
    if step == 2:
        model.load_state_dict({name: value.clone() / 2 for name, value in model.state_dict().items()})


def clamp(model: Any, _: Any, __: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.2, 0.2)


def data_replaced(model: Any, _: Any, step: int) -> None:
    if step == 2:
        for parameter in model.parameters():
            parameter.data = parameter.data / 2


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 4))


class LayerDrop(nn.Module):
    """A layer that is left out now and then, by a number drawn in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(12, 12), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.layer(x)) if torch.rand(()) < 0.5 else x)


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 8),
        nn.BatchNorm1d(8),
        nn.Tanh(),
        nn.Linear(8, 8),
        nn.BatchNorm1d(8, momentum=None),
        nn.Linear(8, 4),
    )


def frozen_norm() -> nn.Module:
    """BatchNorm that was put into eval mode to keep its statistics, as fine-tuning does."""
    model = normed()
    for module in model:
        if isinstance(module, nn.BatchNorm1d):
            module.eval()
    return model


def mixup(model: Any, batch: Any) -> torch.Tensor:
    share, order = torch.rand(()), torch.randperm(len(batch.x))
    outputs = model(share * batch.x + (1 - share) * batch.x[order])
    losses = [functional.cross_entropy(outputs, y) for y in (batch.y, batch.y[order])]
    return share * losses[0] + (1 - share) * losses[1]


def channels_last() -> nn.Module:
    layers = nn.Sequential(nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(4, 4))
    return layers.to(memory_format=torch.channels_last)


def in_double(model: Any, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch.x.double()), batch.y)


def in_bfloat16(model: Any, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch.x.bfloat16()).float(), batch.y)


def in_both(model: Any, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model[1](model[0](batch.x.double()).float()), batch.y)


def wrapped_in_ddp() -> nn.Module:
    return nn.parallel.DistributedDataParallel(small())


def images(_: int) -> Any:
    return [SimpleNamespace(x=x, y=y) for x, y in zip(PICTURES.split(GLOBAL_BATCH), Y.split(GLOBAL_BATCH), strict=True)]


PICTURES = torch.randn(len(X), 3, 8, 8, generator=torch.Generator().manual_seed(1))


PROGRAMS = {
    "tied weights": Program(EQUAL, build=Tied),
    "frozen layers": Program(EQUAL, build=frozen),
    "everything frozen": Program(
        refused(r"no parameter that requires a gradient: there is nothing to train"),
        build=lambda: small().requires_grad_(False),
    ),
    "adapters as in LoRA": Program(EQUAL, build=with_lora, optimizer=adamw),
    "weight norm": Program(EQUAL, build=lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(12, 4)))),
    "spectral norm": Program(EQUAL, build=lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(12, 4)))),
    "orthogonal parametrization": Program(
        EQUAL, build=lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(12, 4)))
    ),
    "a parametrization of one's own": Program(EQUAL, build=symmetric),
    "pruning": Program(EQUAL, build=pruned),
    "batch norm": Program(equal_to(1e-4), build=normed, by_micro_batch=True),
    "batch norm in eval mode": Program(
        EQUAL,
        build=normed,
        loss=lambda model, batch: functional.cross_entropy(model.eval()(batch.x), batch.y),
    ),
    "layers put into eval mode": Program(EQUAL, build=frozen_norm),
    "batch norm over images": Program(
        equal_to(1e-4),
        build=lambda: SmallResNet(4),
        data=lambda: (PICTURES, Y),
        batches=images,
        by_micro_batch=True,
        epochs=1,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
    ),
    "dropout": Program(EQUAL, build=dropping, by_micro_batch=True),
    "a layer left out at random": Program(EQUAL, build=LayerDrop, by_micro_batch=True),
    "mixup in the loop": Program(EQUAL, loss=mixup, by_micro_batch=True),
    "a model given in eval mode": Program(EQUAL, build=lambda: dropping().eval(), by_micro_batch=True),
    "a copy of the model as a teacher": Program(
        EQUAL, loss=lambda model, batch: distil(model, batch), after_step=renew_teacher
    ),
    "buffers": Program(EQUAL, build=Counting),
    "LSTM and padding_idx": Program(EQUAL, build=Reader),
    "unused and empty parameters": Program(EQUAL, build=Unused, optimizer=adamw),
    "parameters without a gradient in some micro-batches": Program(EQUAL, build=SometimesUsed, optimizer=adamw),
    "a model that is no module": Program(EQUAL, build=NotAModule),
    "recomputed activations": Program(EQUAL, build=lambda: Recomputing(reentrant=False)),
    "recomputed activations, reentrant": Program(EQUAL, build=lambda: Recomputing(reentrant=True)),
    "lists and dicts of parameters": Program(EQUAL, build=Mixture),
    "channels last": Program(EQUAL, build=channels_last),
    "float64": Program(EQUAL, build=lambda: small().double(), loss=in_double),
    "bfloat16": Program(equal_to(3e-2), build=lambda: small().bfloat16(), loss=in_bfloat16),
    "float64 and float32": Program(
        EQUAL, build=lambda: nn.Sequential(nn.Linear(12, 8).double(), nn.Linear(8, 4)), loss=in_both
    ),
    "complex parameters": Program(refused(r"torch\.complex64: only real floating point"), build=Complex),
    "sparse embedding": Program(
        refused(r"sparse gradients cannot be averaged.* build it with sparse=False"),
        build=lambda: nn.Sequential(nn.Linear(12, 4), nn.Embedding(3, 4, sparse=True)),
    ),
    "SyncBatchNorm": Program(
        refused(r"is a SyncBatchNorm, which exchanges inside forward"),
        build=lambda: nn.SyncBatchNorm.convert_sync_batchnorm(normed()),
    ),
    "wrapped in DistributedDataParallel": Program(
        refused(r"DistributedDataParallel.*(pass|give|module)"), build=wrapped_in_ddp
    ),
    "a lazy module": Program(
        equal_or_refused(r"lazy|uninitialized.*run .*(once|batch)"),
        build=lambda: nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(4)),
    ),
    "on the meta device": Program(
        refused(r"parameter '0.weight' is on meta"), build=lambda: nn.Sequential(nn.Linear(12, 4, device="meta"))
    ),
    "torch.compile, eager": Program(EQUAL, build=lambda: torch.compile(small(), backend="eager")),
    "layers added later": Program(EQUAL, build=Growing, after_step=grow),
    "a layer taken out": Program(EQUAL, build=two_layers, after_step=shrink),
    "progressive unfreezing": Program(EQUAL, build=frozen, after_step=unfreeze),
    "freezing later": Program(EQUAL, after_step=freeze),
    "freezing and unfreezing by turns": Program(EQUAL, after_step=freeze_and_thaw),
    "load_state_dict on the way": Program(EQUAL, after_step=load),
    "load_state_dict(assign=True) on the way": Program(equal_or_refused(r"assign=True"), after_step=assign),
    "weights clamped after every step": Program(EQUAL, after_step=clamp),
    "p.data replaced": Program(equal_or_refused(r"\.data"), after_step=data_replaced, optimizer=sgd),
}
