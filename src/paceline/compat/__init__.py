"""The names of other systems: `paceline.compat.flodl`, `.ggmlr` and `.resnetimagenet`. See docs/coming-from.md."""

from typing import TYPE_CHECKING

from paceline.core.imports import lazy_names

if TYPE_CHECKING:
    from paceline.compat import flodl as flodl
    from paceline.compat import ggmlr as ggmlr
    from paceline.compat import resnetimagenet as resnetimagenet
else:
    __getattr__ = lazy_names(__name__, {}, ("flodl", "ggmlr", "resnetimagenet"))
