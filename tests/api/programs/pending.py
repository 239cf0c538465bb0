"""Programs that are not right yet, by name or `name (mode)`, and why; a reason that begins with "hangs" is not run.

Empty when issue 15 is done: whoever mends one of these takes it out.
"""

from __future__ import annotations

_RATES = "point 2: replicas drift apart when a worker without a share does not run the loop's body"
_OWNED = "point 2: an optimizer or scheduler of the trainer's that somebody else steps is not noticed"
_LATER = "point 3: parameters that are added, frozen or unfrozen between steps"
_CHANGED = "point 4: gradients that are changed between backward and step are not noticed"
_FP16 = "point 6: fp16 with unscaled gradients, or scaled by somebody else"
_LEFT = "point 8: leaving an epoch, or iterating it twice"
_BARE = "point 11: after a bare backward the record's loss is NaN, and a number on a worker without a share"
_MESSAGE = "point 15: an error of Python's or torch's own, without a remedy"

PENDING: dict[str, str] = {
    "bfloat16": "not in the issue: torch's fused SGD is wrong for bfloat16 on CPUs, and Paceline turns it on",
    "a model given in eval mode": "point 9: set-up leaves the model in eval mode",
    "wrapped in DistributedDataParallel": "point 13: accepted",
    "a lazy module": _MESSAGE,
    "on the meta device": _MESSAGE,
    "layers added later": _LATER,
    "progressive unfreezing": _LATER,
    "freezing later": _LATER,
    "freezing and unfreezing by turns": _LATER,
    "load_state_dict(assign=True) on the way": "point 15: refused by a text that does not name it",
    "a scheduler's object": _MESSAGE,
    "scheduler.step() in the loop": _RATES,
    "scheduler.step() left in": _OWNED,
    "rates set in the loop": _RATES,
    "momentum set in the loop": _RATES,
    "trainer.set_lr": "point 2: does not exist",
    "clip_grad_norm_ in the loop": _CHANGED,
    "gradients scaled in the loop": _CHANGED,
    "noise on gradients in the loop": _CHANGED,
    "gradients dropped in the loop": _CHANGED,
    "gradients logged by p.grad": "point 4: p.grad is None after backward in some micro-batches and modes",
    "hooks when a gradient has come (exact)": "point 4: p.grad is None in the user's post-accumulate hook",
    "optimizer.step() left in": _OWNED,
    "optimizer.step() left in after the step": _OWNED,
    "GradScaler": _FP16,
    "fp16 with a bare backward": _FP16,
    "a collate_fn that drops samples": "point 5: weighed by indices, not by rows",
    "gradients assigned by hand": _BARE,
    "bare loss.backward()": _BARE,
    "bare torch.autograd.backward": _BARE,
    "bare backward(retain_graph=True)": _BARE,
    "trainer.backward(retain_graph=True)": _MESSAGE,
    "bare backward(create_graph=True)": _MESSAGE,
    "break after a step": _LEFT,
    "break in a micro-batch": _LEFT,
    "a slice of an epoch": _LEFT,
    "trainer.end_epoch": _LEFT,
    "an epoch iterated twice": _LEFT,
    "a list of epochs": "not in the issue: only the first epoch is trained, silently",
    "len(epoch)": "point 15: does not exist",
    "trainer.last_record": "point 7: does not exist",
    "weights changed in the loop": "point 2: replicas that drift apart are not noticed",
    "training after close": "point 15: not refused",
}
