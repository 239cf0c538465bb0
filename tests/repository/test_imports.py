"""`import paceline` costs what `import torch` costs: it brings in nothing else of weight.

Counted by module, not by the clock, so that the result is the same on every machine.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# Beside our own: the standard library, and a few small modules that torch and numpy do not import by themselves.
ALLOWED_PACKAGES = {"paceline", *sys.stdlib_module_names}
ALLOWED_MODULES = {"numpy.typing", "numpy._typing._add_docstring"}
MAX_MODULES_RATIO = 1.15

LIST_MODULES = """
import json, sys
import torch, numpy
before = set(sys.modules)
import paceline
print(json.dumps([sorted(before), sorted(set(sys.modules) - before)]))
"""


@pytest.fixture(scope="module")
def imported() -> tuple[list[str], list[str]]:
    """The modules after `import torch, numpy`, and those that `import paceline` adds, in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", LIST_MODULES], stdout=subprocess.PIPE, text=True, timeout=60, check=True
    )
    before, added = json.loads(done.stdout)
    return before, added


def test_nothing_but_ours_and_the_standard_library(imported: tuple[list[str], list[str]]) -> None:
    _, added = imported
    assert "paceline" in added
    foreign = [n for n in added if n.partition(".")[0] not in ALLOWED_PACKAGES and n not in ALLOWED_MODULES]
    assert not foreign, f"import paceline also imports {foreign}: import them where they are used"


def test_few_modules_beside_those_of_torch(imported: tuple[list[str], list[str]]) -> None:
    before, added = imported
    assert len(before) + len(added) <= MAX_MODULES_RATIO * len(before)
