"""Paceline: one training run, any hardware.

Names are imported from their modules on first use, so that `paceline run` can start the workers' process before it
imports torch. Errors are in `paceline.errors`, sources of data in `paceline.data`, and the names of other systems in
`paceline.compat`.
"""

from typing import TYPE_CHECKING

from paceline.core.imports import lazy_names

__version__ = "0.3.0"

_HOMES = {
    "Averaging": "paceline.sync.averaging.strategy",
    "Balancing": "paceline.run.settings",
    "Batches": "paceline.data.sources.batches",
    "Batching": "paceline.run.settings",
    "Cadence": "paceline.plan.cadence",
    "Checkpoints": "paceline.run.saving.options",
    "Ddp": "paceline.api.ddp",
    "EarlyStopping": "paceline.api.early_stopping",
    "Gradients": "paceline.sync.compression.settings",
    "Loading": "paceline.run.settings",
    "Optimization": "paceline.run.settings",
    "PacelineError": "paceline.core.errors",
    "PerWorker": "paceline.data.sources.batches",
    "Recording": "paceline.api.recording",
    "Runtime": "paceline.run.settings",
    "StepRecord": "paceline.run.step.record",
    "Trainer": "paceline.api.trainer",
    "World": "paceline.core.world",
    "dp_train": "paceline.api.dp_train",
    "launch": "paceline.run.launching.launch",
}
# Where further names are. Some of them were in this module before.
_OTHER_MODULES = ("data", "reports", "errors", "compat.flodl", "compat.ggmlr", "compat.resnetimagenet")

__all__ = list(_HOMES)

if TYPE_CHECKING:
    # The table again, for type checkers and editors, which do not run `__getattr__`.
    from paceline import compat as compat
    from paceline import data as data
    from paceline import errors as errors
    from paceline import reports as reports
    from paceline.api.ddp import Ddp as Ddp
    from paceline.api.dp_train import dp_train as dp_train
    from paceline.api.early_stopping import EarlyStopping as EarlyStopping
    from paceline.api.recording import Recording as Recording
    from paceline.api.trainer import Trainer as Trainer
    from paceline.core.errors import PacelineError as PacelineError
    from paceline.core.world import World as World
    from paceline.data.sources.batches import Batches as Batches
    from paceline.data.sources.batches import PerWorker as PerWorker
    from paceline.plan.cadence import Cadence as Cadence
    from paceline.run.launching.launch import launch as launch
    from paceline.run.saving.options import Checkpoints as Checkpoints
    from paceline.run.settings import Balancing as Balancing
    from paceline.run.settings import Batching as Batching
    from paceline.run.settings import Loading as Loading
    from paceline.run.settings import Optimization as Optimization
    from paceline.run.settings import Runtime as Runtime
    from paceline.run.step.record import StepRecord as StepRecord
    from paceline.sync.averaging.strategy import Averaging as Averaging
    from paceline.sync.compression.settings import Gradients as Gradients
else:
    __getattr__ = lazy_names(__name__, _HOMES, ("compat", "data", "errors", "reports"), _OTHER_MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
