"""Write a story with a trained model, word by word."""

from __future__ import annotations

import torch
from model import StoryModel
from stories import END, PAD, START


@torch.no_grad()
def write_story(model: StoryModel, *, seed: int = 0, temperature: float = 0.7) -> list[int]:
    """The tokens of one story, ended by the model itself or by the model's maximum length.

    The draws come from a generator of their own on the CPU, so the same weights and seed give the same story.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = [START]
    while tokens[-1] != END and len(tokens) < model.max_length:
        scores = model(torch.tensor([tokens], device=device))[0, -1].float().cpu() / temperature
        scores[[PAD, START]] = -torch.inf
        tokens.append(int(torch.multinomial(scores.softmax(0), 1, generator=generator)))
    model.train(was_training)
    return tokens
