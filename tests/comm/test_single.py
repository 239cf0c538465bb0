from __future__ import annotations

import pytest
import torch

from paceline.comm import connect
from paceline.comm.single import SingleCommunicator
from paceline.core.world import World


def test_a_world_of_one_exchanges_nothing() -> None:
    alone = connect(World())
    assert isinstance(alone, SingleCommunicator)
    tensor = torch.tensor([3.0])
    alone.all_reduce(tensor).wait()
    alone.broadcast(tensor).wait()
    alone.close()
    assert tensor.item() == 3.0
    assert alone.empty(4, torch.float32, torch.device("cpu")).shape == (4,)
    with pytest.raises(ValueError, match="serves a world of 1 worker, not 2"):
        SingleCommunicator(World(0, 2))
