"""Reading data: sources of samples, and feeds that deliver micro-batches. Names are imported on first use."""

from typing import TYPE_CHECKING

from paceline.core.lazy import lazy_names

_HOMES = {
    "ArrayLoader": "paceline.data.array_loader",
    "ArrowSource": "paceline.data.sources.arrow",
    "Batches": "paceline.data.sources.batches",
    "ImageFolder": "paceline.data.sources.images",
    "Pair": "paceline.data.sources.base",
    "PerWorker": "paceline.data.sources.batches",
    "SkipBad": "paceline.data.sources.skip_bad",
    "Skipped": "paceline.data.sources.skip_bad",
    "Source": "paceline.data.sources.base",
    "TokenFile": "paceline.data.sources.tokens",
    "as_source": "paceline.data.sources.base",
}

__all__ = list(_HOMES)

if TYPE_CHECKING:
    from paceline.data.array_loader import ArrayLoader as ArrayLoader
    from paceline.data.sources.arrow import ArrowSource as ArrowSource
    from paceline.data.sources.base import Pair as Pair
    from paceline.data.sources.base import Source as Source
    from paceline.data.sources.base import as_source as as_source
    from paceline.data.sources.batches import Batches as Batches
    from paceline.data.sources.batches import PerWorker as PerWorker
    from paceline.data.sources.images import ImageFolder as ImageFolder
    from paceline.data.sources.skip_bad import SkipBad as SkipBad
    from paceline.data.sources.skip_bad import Skipped as Skipped
    from paceline.data.sources.tokens import TokenFile as TokenFile
else:
    __getattr__ = lazy_names(__name__, _HOMES)
