"""The training pipeline of ResNetImageNet.jl: prepare, then step by step, or `train`.

python examples/ported/from_resnetimagenet.py
"""

from __future__ import annotations

import sys

import torch
from data import accuracy, make_model, make_points
from torch.nn import functional as F

from paceline.compat.resnetimagenet import prepare_training, sync_buffer, train, train_step, update

devices = [torch.device("cpu")] * 2


def sgd(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.2)


def main() -> int:
    # for d in data: gradient(...); @synchronize_gradients_over_all_GPUs; model, state = opt(model, grads, state)
    with prepare_training(make_model(), make_points(), devices, sgd, 32, epochs=3) as state:
        for batches in state.loader:
            for replica, batch in enumerate(batches):
                train_step(F.cross_entropy, state, batch, replica)
            sync_buffer(state)
            update(state)
        by_hand = accuracy(state.models[0])
    with prepare_training(make_model(), make_points(), devices, sgd, 32, epochs=3) as state:
        train(F.cross_entropy, state)
        by_train = accuracy(state.models[0])
    print(by_hand, by_train)
    return 0 if min(by_hand, by_train) > 0.8 else 1


if __name__ == "__main__":
    sys.exit(main())
