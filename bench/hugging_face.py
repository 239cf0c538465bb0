"""The HF Trainer as a contestant, with everything off that is not training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def training_alone(folder: str, max_steps: int, batch: int, **others: Any) -> Any:
    """`TrainingArguments` without clipping, a schedule, logging and saving. It insists on a folder all the same."""
    from transformers import TrainingArguments

    return TrainingArguments(
        folder,
        max_steps=max_steps,
        per_device_train_batch_size=batch,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        logging_strategy="no",
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        **others,
    )


def tell_steps(trainer: Any, step_ended: Callable[[int], None]) -> None:
    """Call `step_ended` with the number of every step, and print nothing."""
    from transformers import PrinterCallback, TrainerCallback

    class Timing(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            step_ended(state.global_step)

    trainer.add_callback(Timing())
    trainer.remove_callback(PrinterCallback)
