"""Builds a replica's parts from the user's arguments, and refuses models that cannot be trained in parallel."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from paceline.comm.base import Communicator
from paceline.core.errors import MisuseError
from paceline.core.generators import host_randomness, seed_device
from paceline.core.seeding import Purpose, derive_seed


def plain_name(name: str) -> str:
    """The name of a parameter without the prefix of torch.compile's wrapper."""
    return name.removeprefix("_orig_mod.")


def only_or_all(things: list[Any]) -> Any:
    """The only item, or the list if there are several."""
    return things[0] if len(things) == 1 else things


def as_list(one_or_several: Any) -> list[Any]:
    return list(one_or_several) if isinstance(one_or_several, Sequence) else [one_or_several]


def check_optimizers(optimizers: list[Any], parameters: list[torch.Tensor]) -> None:
    own = {id(parameter) for parameter in parameters}
    if not optimizers:
        raise ValueError("optimizer is an empty list: give at least one optimizer")
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer made a {type(optimizer).__name__}: pass a function from parameters to a torch "
                "optimizer, such as lambda params: torch.optim.AdamW(params, lr=1e-3), or a list of optimizers"
            )
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in own:
                    raise MisuseError(
                        f"a parameter of shape {tuple(parameter.shape)} in group {number} of the "
                        f"{type(optimizer).__name__} optimizer is not one of the model's, and would not be trained: "
                        "build the optimizer over the model that is given to the trainer, or pass a function from "
                        "parameters to an optimizer"
                    )


def refuse_closures(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse optimizers that evaluate the loss: they would need all micro-batches of the step each time."""
    for optimizer in optimizers:
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise TypeError(
                f"optimizer is a {type(optimizer).__name__}, whose step(closure) computes the loss several times, but "
                "a step has only one gradient, the mean over its micro-batches. Choose an optimizer that needs no "
                "closure, such as torch.optim.AdamW"
            )


def schedulers_of(scheduler: Any, optimizers: list[torch.optim.Optimizer], seen: Any) -> list[Any]:
    """The schedulers of `scheduler=`: a function is called with `seen`, the optimizer or the list of optimizers."""
    if not callable(scheduler):
        given = as_list(scheduler)
        for each in given:
            _check_scheduler(each, "scheduler is")
            if not any(getattr(each, "optimizer", None) is optimizer for optimizer in optimizers):
                raise TypeError(
                    f"scheduler is a {type(each).__name__} over another optimizer than the run's: pass a function, "
                    f"such as lambda optimizer: {type(each).__name__}(optimizer, ...), or the optimizer that it was "
                    "made with"
                )
        return given
    made = as_list(scheduler(seen))
    for each in made:
        _check_scheduler(each, "scheduler made")
    return made


def _check_scheduler(scheduler: Any, what: str) -> None:
    if not callable(getattr(scheduler, "step", None)):
        raise TypeError(
            f"{what} a {type(scheduler).__name__} without step(): pass a function from the optimizer to a torch "
            "scheduler, such as lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)"
        )


def named_parameters(model: Any) -> dict[str, torch.Tensor]:
    """The parameters of a module, or of any object whose `parameters()` gives tensors or a dict of them.

    Tied parameters appear once, under their first name.
    """
    if isinstance(model, nn.Module):
        return dict(model.named_parameters())
    if not callable(getattr(model, "parameters", None)):
        raise TypeError(
            f"the model is a {type(model).__name__} without a parameters() method: "
            "return an nn.Module, an object with one as an attribute, or an object with forward(x) and parameters()"
        )
    found: Mapping[str, torch.Tensor] | Iterable[torch.Tensor] = model.parameters()
    items = found.items() if isinstance(found, Mapping) else ((str(i), p) for i, p in enumerate(found))
    unique: dict[int, tuple[str, torch.Tensor]] = {}
    for name, parameter in items:
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(f"parameters() gave {type(parameter).__name__} for {name!r}: it must give tensors")
        unique.setdefault(id(parameter), (name, parameter))
    return dict(unique.values())


def build_model(model: Any, device: torch.device, seed: int) -> Any:
    """Move an existing model, or call a factory with seeded generators, so that every worker builds the same model."""
    is_model = hasattr(model, "parameters") or any(hasattr(model, name) for name in ("compute_loss", "forward"))
    is_factory = isinstance(model, type) or (callable(model) and not is_model)
    if not is_factory:
        return _move(_module_of(model), device)
    with host_randomness() as randomness:
        model_seed = derive_seed(seed, Purpose.MODEL_INIT)
        randomness.seed(model_seed)
        seed_device(device, model_seed)
        built = model()
    return _move(_module_of(built), device)


class ModuleOfWrapper(nn.Module):
    """The module to train of `wrapper`, an object that is not a module and has modules as attributes.

    It also has the wrapper's methods and attributes.
    """

    def __init__(self, wrapper: Any, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.__dict__["wrapper"] = wrapper

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "wrapper" not in self.__dict__:  # being copied or unpickled
                raise
            return getattr(self.__dict__["wrapper"], name)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        wrapper = self.__dict__["wrapper"]
        candidates = [getattr(wrapper, "forward", None), wrapper, *self.children()]
        return next(filter(callable, candidates))(*arguments, **named)


def _module_of(model: Any) -> Any:
    """The model itself, or the modules of an object without `parameters()`, such as `wrapper.model`."""
    if isinstance(model, nn.Module) or hasattr(model, "parameters"):
        return model
    modules = {name: value for name, value in getattr(model, "__dict__", {}).items() if isinstance(value, nn.Module)}
    return ModuleOfWrapper(model, modules) if modules else model


def _move(model: Any, device: torch.device) -> Any:
    for name, parameter in named_parameters(model).items():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"parameter {name!r} belongs to a lazy module and is uninitialized: run the model on one batch before "
                "the set-up"
            )
        if parameter.is_meta:
            raise ValueError(
                f"parameter {name!r} is on meta, without values: build the model on a real device, or give it values "
                "first (model.to_empty(device=...), then initialise it or load a state_dict)"
            )
    if isinstance(model, nn.Module):
        return model.to(device)
    for parameter in named_parameters(model).values():
        parameter.data = parameter.data.to(device)
    return model


def check_modules(model: Any) -> None:
    """Refuse layers whose gradients or forward passes depend on other workers, or cannot be averaged."""
    refuse_wrapped(model)
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, nn.SyncBatchNorm):
            raise MisuseError(
                f"{name!r} is a SyncBatchNorm, which exchanges inside forward, but micro-batches are independent. "
                "Use BatchNorm: its statistics do not depend on the number of workers"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise MisuseError(
                f"{name!r} is built with sparse=True; sparse gradients cannot be averaged in a flat buffer: "
                "build it with sparse=False"
            )


def refuse_wrapped(model: Any) -> None:
    """Refuse a model that another library already divides or replicates: DDP, FSDP, DataParallel."""
    if not isinstance(model, nn.Module):
        return
    kinds = (
        nn.parallel.DistributedDataParallel,
        nn.DataParallel,
        *_loaded("torch.distributed.fsdp", "FullyShardedDataParallel"),
    )
    for name, module in model.named_modules():
        if isinstance(module, kinds):
            what = f"its module {name!r}" if name else "the model"
            raise MisuseError(
                f"{what} is a {type(module).__name__}, which exchanges or divides by itself, at times that depend on "
                "the worker's share: give the model that it wraps (its .module). Paceline does the exchange"
            )
    sharded = _loaded("torch.distributed.tensor", "DTensor")
    for name, parameter in model.named_parameters() if sharded else ():
        if isinstance(parameter, sharded):
            raise MisuseError(
                f"parameter {name!r} is a {type(parameter).__name__}, sharded over devices by fully_shard or "
                "parallelize_module: give the plain model, of which every worker holds a whole copy"
            )


def _loaded(module: str, name: str) -> tuple[type, ...]:
    """The class, if its module is imported: otherwise no model is an instance, and importing it takes long."""
    kind = getattr(sys.modules.get(module), name, None)
    return (kind,) if isinstance(kind, type) else ()


class ReplacementWatch:
    """Called by torch when a state was loaded: `load_state_dict(assign=True)` puts other parameters into the model.

    A model with it can be copied and pickled; copies are not watched.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], model: nn.Module | None) -> None:
        self._parameters = dict(parameters)
        self._model = model

    def __reduce__(self) -> tuple[type[ReplacementWatch], tuple[Any, ...]]:
        return ReplacementWatch, ({}, None)

    def __call__(self, *_: object) -> None:
        if self._model is None:
            return
        now = {id(parameter) for parameter in self._model.parameters()}
        for name, parameter in self._parameters.items():
            if id(parameter) not in now:
                raise MisuseError(
                    f"load_state_dict(assign=True) replaced parameter {name!r} of the model that is trained; the "
                    "optimizer still updates the old one. Load without assign=True, which copies the values in, or "
                    "load before Trainer.setup"
                )


def watch_replacement(model: Any, parameters: Mapping[str, torch.Tensor]) -> Callable[[], None]:
    """Make loads that replace parameters an error. Returns a function that ends this."""
    if not isinstance(model, nn.Module):
        return lambda: None
    watch = ReplacementWatch(parameters, model)
    handles = [module.register_load_state_dict_post_hook(watch) for module in model.modules()]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


@torch.no_grad()
def share_weights(model: Any, parameters: Mapping[str, torch.Tensor], communicator: Communicator) -> None:
    """Send rank 0's parameters and buffers, also frozen ones, to every worker, after checking that shapes agree."""
    if communicator.world.size == 1:
        return
    if isinstance(model, nn.Module):
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    else:
        tensors = dict(parameters)
    _check_agreement(tensors, communicator)
    for tensor in tensors.values():
        carrier = tensor.detach().contiguous()
        communicator.broadcast(carrier, 0).wait()
        tensor.copy_(carrier)


def _check_agreement(tensors: Mapping[str, torch.Tensor], communicator: Communicator) -> None:
    """Compare a digest of all shapes: exchanging tensors of different shapes would hang or corrupt them."""
    world = communicator.world
    text = ";".join(f"{name}:{tuple(t.shape)}:{t.dtype}" for name, t in tensors.items())
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")  # exact in a float64
    digests = torch.zeros(world.size, dtype=torch.float64, device=world.device)
    digests[world.rank] = digest
    communicator.all_reduce(digests).wait()
    different = [rank for rank, other in enumerate(digests.tolist()) if other != digests[0].item()]
    if different:
        raise MisuseError(
            f"ranks {different} built a model whose parameters or buffers differ from rank 0's in name, shape or "
            f"dtype (rank {world.rank} has {len(tensors)}): every worker must build the same model"
        )
