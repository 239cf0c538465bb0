"""A GAN with a loop of its own: two replicas of generator and discriminator, and a `Ddp` for each of the two models.

A trainer that owns the step does not fit here: two models take turns, each with its own loss and optimizer, and a step
of one runs backward through the other. `Ddp` leaves all that to the loop. It is told when the replicas of a model have
their gradients, and gives all of them the mean.

The target are three round clouds in the plane. How far the generated points are from it is measured by the squared
maximum mean discrepancy (MMD), before and after training, for three seeds.

    python examples/gan.py
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl

NUM_REPLICAS, NUM_STEPS, BATCH, NOISE_DIMENSIONS = 2, 200, 64, 4
PENALTY = 0.1
NUM_EVALUATED, BANDWIDTH = 512, 1.0
CENTRES = torch.tensor([[2.0, 0.0], [-1.0, 1.7], [-1.0, -1.7]])


def make_generator() -> nn.Module:
    return nn.Sequential(nn.Linear(NOISE_DIMENSIONS, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


def make_discriminator() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))


def real_points(count: int, source: torch.Generator) -> torch.Tensor:
    clouds = torch.randint(len(CENTRES), (count,), generator=source)
    return CENTRES[clouds] + 0.3 * torch.randn(count, 2, generator=source)


def noise(count: int, source: torch.Generator) -> torch.Tensor:
    return torch.randn(count, NOISE_DIMENSIONS, generator=source)


def discriminator_loss(discriminator: nn.Module, real: torch.Tensor, generated: torch.Tensor) -> torch.Tensor:
    """Tell real from generated, but without steep slopes at real points: those make the two models chase in circles."""
    real.requires_grad_()
    scores = discriminator(real)
    (slopes,) = torch.autograd.grad(scores.sum(), real, create_graph=True)
    penalty = PENALTY * slopes.square().sum(dim=1).mean()
    return F.softplus(-scores).mean() + F.softplus(discriminator(generated)).mean() + penalty


def squared_mmd(a: torch.Tensor, b: torch.Tensor) -> float:
    """0 for equal distributions, by a Gaussian kernel: what is near counts, what is far does not."""

    def similarity(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.exp(-torch.cdist(x, y).square() / (2 * BANDWIDTH**2)).mean()

    return (similarity(a, a) + similarity(b, b) - 2 * similarity(a, b)).item()


@torch.no_grad()
def distance_to_target(generator: nn.Module) -> float:
    source = torch.Generator().manual_seed(12345)  # the same noise and the same target points every time
    return squared_mmd(generator(noise(NUM_EVALUATED, source)), real_points(NUM_EVALUATED, source))


def train(seed: int) -> tuple[float, float, bool]:
    """The distance to the target before and after, and whether the replicas ended with equal weights."""
    torch.manual_seed(seed)
    generators = [make_generator() for _ in range(NUM_REPLICAS)]
    discriminators = [make_discriminator() for _ in range(NUM_REPLICAS)]
    # Every replica has a stream of random numbers of its own: together they see one large batch.
    sources = [torch.Generator().manual_seed(1000 * seed + replica) for replica in range(NUM_REPLICAS)]

    with pl.Ddp.wrap(generators) as generator_ddp, pl.Ddp.wrap(discriminators) as discriminator_ddp:
        generator_ddp.sync_params()
        discriminator_ddp.sync_params()
        # One optimizer per replica. Equal weights and equal gradients keep them equal.
        generator_steps = [torch.optim.Adam(g.parameters(), lr=2e-3, betas=(0.5, 0.9)) for g in generators]
        discriminator_steps = [torch.optim.Adam(d.parameters(), lr=2e-3, betas=(0.5, 0.9)) for d in discriminators]
        before = distance_to_target(generators[0])

        for _ in range(NUM_STEPS):
            # The discriminators learn to tell real points from generated ones.
            for generator, discriminator, source in zip(generators, discriminators, sources, strict=True):
                discriminator.zero_grad()  # also of what the generator's turn left in it
                generated = generator(noise(BATCH, source)).detach()
                discriminator_loss(discriminator, real_points(BATCH, source), generated).backward()
            discriminator_ddp.all_reduce_gradients()
            for optimizer in discriminator_steps:
                optimizer.step()

            # The generators learn to pass for real. Backward runs through the discriminators, which do not move.
            for generator, discriminator, source in zip(generators, discriminators, sources, strict=True):
                generator.zero_grad()
                F.softplus(-discriminator(generator(noise(BATCH, source)))).mean().backward()
            generator_ddp.all_reduce_gradients()
            for optimizer in generator_steps:
                optimizer.step()

        after = distance_to_target(generators[0])
    pairs = zip(generators[0].parameters(), generators[1].parameters(), strict=True)
    return before, after, all(torch.equal(first, second) for first, second in pairs)


def main() -> int:
    torch.set_num_threads(1)  # models this small are slower with more
    passed = True
    for seed in (1, 2, 3):
        before, after, are_equal = train(seed)
        print(f"seed {seed}: squared MMD {before:.4f} -> {after:.4f}; replicas equal to the bit: {are_equal}")
        passed = passed and after <= 0.5 * before and are_equal
    if not passed:
        print("the distance did not halve for every seed, or the replicas came apart", file=sys.stderr)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
