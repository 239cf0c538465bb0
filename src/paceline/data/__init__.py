"""Reading data: sources of samples, and feeds that deliver micro-batches."""

from paceline.data.array_loader import ArrayLoader
from paceline.data.sources.arrow import ArrowSource
from paceline.data.sources.base import Pair, Source, as_source
from paceline.data.sources.batches import Batches, PerWorker
from paceline.data.sources.images import ImageFolder
from paceline.data.sources.skip_bad import SkipBad, Skipped
from paceline.data.sources.tokens import TokenFile

__all__ = [
    "ArrayLoader",
    "ArrowSource",
    "Batches",
    "ImageFolder",
    "Pair",
    "PerWorker",
    "SkipBad",
    "Skipped",
    "Source",
    "TokenFile",
    "as_source",
]
