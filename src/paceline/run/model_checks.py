"""What a model may not be, and may not become while it is trained."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from paceline.core.errors import MisuseError


def check_modules(model: Any) -> None:
    """Refuse layers whose gradients or forward passes depend on other workers, or cannot be averaged."""
    refuse_wrapped(model)
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, nn.SyncBatchNorm):
            raise MisuseError(
                f"{name!r} is a SyncBatchNorm, which exchanges inside forward; micro-batches are independent here. "
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
    kinds = (nn.parallel.DistributedDataParallel, nn.DataParallel, *_loaded("torch.distributed.fsdp", _FSDP))
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
                "parallelize_module: give the plain model. Every worker holds a whole copy here"
            )


_FSDP = "FullyShardedDataParallel"


def _loaded(module: str, name: str) -> tuple[type, ...]:
    """The class, where its module has been imported: a model can only be one then, and importing it takes long."""
    kind = getattr(sys.modules.get(module), name, None)
    return (kind,) if isinstance(kind, type) else ()


class ReplacementWatch:
    """Called by torch when a state was loaded: `load_state_dict(assign=True)` puts other parameters into the model.

    A model with it can be copied and pickled; nobody watches the copy.
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
    """From now on a load that replaces parameters is an error; returns what ends that."""
    if not isinstance(model, nn.Module):
        return lambda: None
    watch = ReplacementWatch(parameters, model)
    handles = [module.register_load_state_dict_post_hook(watch) for module in model.modules()]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end
