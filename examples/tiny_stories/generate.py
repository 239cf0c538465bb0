"""What a trained model has learned: a story, word by word, and a number to measure it by."""

from __future__ import annotations

import textwrap

import torch
from batches import Batch, collate, num_words
from corpus import Corpus
from model import StoryModel, word_loss
from words import END, PAD, START, UNKNOWN, unigram_entropy

# The part of the unigram entropy that nobody gets down to who has only learned how often words occur.
ENOUGH = 0.6
BATCH = 50


def tell(model: StoryModel, corpus: Corpus) -> str:
    """A story, and how the loss on held-out stories compares to what counting words can reach."""
    story = corpus.vocabulary.decode(write_story(model))
    loss, entropy = held_out_loss(model, corpus), unigram_entropy(corpus.all_stories)
    has_learned = loss <= ENOUGH * entropy
    verdict = f"at most {ENOUGH}: it has learned how stories go" if has_learned else f"above {ENOUGH}: train longer"
    return f"""
A story by the trained model:
{textwrap.indent(textwrap.fill(story, 78), "  ")}

evaluation loss  {loss:.3f} nats per word, on stories never trained on
unigram entropy  {entropy:.3f}, all that counting words can reach
ratio            {loss / entropy:.2f}, {verdict}"""


@torch.no_grad()
def write_story(model: StoryModel, *, seed: int = 0, temperature: float = 0.7) -> list[int]:
    """The tokens of one story, ended by the model itself or by the model's maximum length.

    The draws come from a generator of their own on the CPU, so the same weights and seed give the same story.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = [START]
    while tokens[-1] != END and len(tokens) < model.max_length:
        scores = model(torch.tensor([tokens], device=device))[0, -1].float().cpu() / temperature
        scores[[PAD, START, UNKNOWN]] = -torch.inf
        tokens.append(int(torch.multinomial(scores.softmax(0), 1, generator=generator)))
    return tokens


@torch.no_grad()
def held_out_loss(model: StoryModel, corpus: Corpus) -> float:
    """The mean over all words of the held-out stories, in nats."""
    device = next(model.parameters()).device
    total, words = 0.0, 0
    for start in range(0, len(corpus.held_out), BATCH):
        batch = collate(corpus.held_out[start : start + BATCH])
        on_device = Batch(batch.x.to(device), batch.y.to(device))
        total += num_words(batch) * float(word_loss(model, on_device))
        words += num_words(batch)
    return total / words
