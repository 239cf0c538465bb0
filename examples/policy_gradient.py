"""REINFORCE on a grid world: every replica plays its own episodes, and counts for as many actions as it took.

An episode ends when the goal is reached, so nobody knows beforehand how many actions a replica will take; and one
replica plays three times as many episodes as the other, as a faster device would. Each one's loss is a mean over its
own actions. `weighted_all_reduce_gradients` makes of that the mean over all actions: the gradient that one model would
have had that played all episodes itself.

The mean return of the trained policy must pass a fixed value, for three seeds.

    python examples/policy_gradient.py
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl

# The world: 5 x 5 cells, the goal in a corner. Every action costs 1; an episode is cut after 30.
SIDE, GOAL, MAX_ACTIONS = 5, (4, 4), 30
MOVES = torch.tensor([[1, 0], [-1, 0], [0, 1], [0, -1]])
EPISODES = (12, 4)  # per iteration, by replica
NUM_ITERATIONS = 100
# A random walk gets about -25, the shortest ways on average -4.2 (starts at the goal do not count).
REQUIRED_RETURN = -5.0


class Experience(NamedTuple):
    """One row for every action taken. `gain`: the rewards from that action to the end of its episode."""

    states: torch.Tensor
    actions: torch.Tensor
    gains: torch.Tensor


def make_policy() -> nn.Module:
    """From a cell to a score for each move, and a guess of the gain to come, which serves as the baseline."""
    return nn.Sequential(nn.Linear(SIDE * SIDE, 32), nn.Tanh(), nn.Linear(32, len(MOVES) + 1))


def observe(positions: torch.Tensor) -> torch.Tensor:
    return F.one_hot(positions[:, 0] * SIDE + positions[:, 1], SIDE * SIDE).float()


@torch.no_grad()
def play(policy: nn.Module, num_episodes: int, source: torch.Generator) -> Experience:
    """Episodes from random cells, all at once; who has reached the goal acts no more."""
    cells = torch.randint(SIDE * SIDE - 1, (num_episodes,), generator=source)  # any but the last, which is the goal
    positions = torch.stack([cells // SIDE, cells % SIDE], dim=1)
    is_playing = torch.ones(num_episodes, dtype=torch.bool)
    states, actions, playing = [], [], []
    while is_playing.any() and len(states) < MAX_ACTIONS:
        states.append(observe(positions))
        probabilities = policy(states[-1])[:, : len(MOVES)].softmax(dim=1)
        actions.append(torch.multinomial(probabilities, 1, generator=source).squeeze(1))
        playing.append(is_playing)
        positions = (positions + MOVES[actions[-1]]).clamp(0, SIDE - 1)
        is_playing = is_playing & (positions != torch.tensor(GOAL)).any(dim=1)
    acted = torch.stack(playing)  # by time and episode
    gains = -acted.flip(0).cumsum(0).flip(0).float()  # every action from now on costs 1
    return Experience(torch.stack(states)[acted], torch.stack(actions)[acted], gains[acted])


def loss_of(policy: nn.Module, experience: Experience) -> torch.Tensor:
    """A mean over the actions: likelier if they gained more than the baseline said, and a better baseline."""
    scores, baseline = policy(experience.states).split([len(MOVES), 1], dim=1)
    log_probabilities = scores.log_softmax(dim=1).gather(1, experience.actions[:, None]).squeeze(1)
    surplus = experience.gains - baseline.squeeze(1)
    return -(log_probabilities * surplus.detach()).mean() + 0.5 * surplus.square().mean()


def mean_return(policy: nn.Module) -> float:
    num_episodes = 400
    experience = play(policy, num_episodes, torch.Generator().manual_seed(12345))
    return -len(experience.actions) / num_episodes


def train(seed: int) -> tuple[float, float, bool]:
    """The mean return before and after, and whether the replicas ended with equal weights."""
    torch.manual_seed(seed)
    policies = [make_policy() for _ in EPISODES]
    with pl.Ddp.wrap(policies) as ddp:
        ddp.sync_params()
        optimizers = [torch.optim.Adam(policy.parameters(), lr=0.02) for policy in policies]
        before = mean_return(policies[0])
        for iteration in range(NUM_ITERATIONS):
            counts = []
            for policy, num_episodes, replica in zip(policies, EPISODES, ddp.ranks, strict=True):
                # Its random numbers belong to this replica's part of this iteration, whatever ran before.
                source = torch.Generator().manual_seed((seed * NUM_ITERATIONS + iteration) * ddp.world_size + replica)
                experience = play(policy, num_episodes, source)
                policy.zero_grad()
                loss_of(policy, experience).backward()
                counts.append(len(experience.actions))
            ddp.weighted_all_reduce_gradients(counts)
            for optimizer in optimizers:
                optimizer.step()
        after = mean_return(policies[0])
    pairs = zip(policies[0].parameters(), policies[1].parameters(), strict=True)
    return before, after, all(torch.equal(first, second) for first, second in pairs)


def main() -> int:
    torch.set_num_threads(1)  # models this small are slower with more
    passed = True
    for seed in (1, 2, 3):
        before, after, are_equal = train(seed)
        print(f"seed {seed}: mean return {before:.2f} -> {after:.2f}; replicas equal to the bit: {are_equal}")
        passed = passed and after > REQUIRED_RETURN and are_equal
    if not passed:
        print(f"the return did not pass {REQUIRED_RETURN} for every seed, or the replicas came apart", file=sys.stderr)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
