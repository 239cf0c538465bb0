"""`import paceline` costs nothing, all of it little more than `import torch`: it brings in nothing else of weight.

Counted by module, not by the clock, so that the result is the same on every machine.
"""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from importlib import import_module

import pytest

import paceline

# Beside our own: the standard library, and a few small modules that torch and numpy do not import by themselves.
ALLOWED_PACKAGES = {"paceline", *sys.stdlib_module_names}
ALLOWED_MODULES = {"numpy.typing", "numpy._typing._add_docstring"}
MAX_MODULES_RATIO = 1.2

LIST_MODULES = """
import json, sys
import torch, numpy
before = set(sys.modules)
import paceline
for name in paceline.__all__:
    getattr(paceline, name)
print(json.dumps([sorted(before), sorted(set(sys.modules) - before)]))
"""


START_A_RUN = """
import sys
import paceline, paceline.run.launching.launch
from paceline.cli.main import make_parser
options = make_parser("run").parse_args(["run", "--workers", "2", "train.py"])
assert paceline.run.launching.launch.workers_to_start(options.workers) == 2
print([name for name in ("torch", "numpy", "yaml", "pydantic") if name in sys.modules])
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


def test_workers_do_not_wait_until_their_launcher_has_imported_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", START_A_RUN], stdout=subprocess.PIPE, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"


def test_type_checkers_see_the_names_that_there_are() -> None:
    """The names are listed twice: in a table for Python, and as imports for those who do not run it."""
    tree = ast.parse(inspect.getsource(paceline))
    imports = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paceline.") and node.names[0].asname
    ]
    seen = {alias.asname: (node.module, alias.name) for node in imports for alias in node.names}
    assert seen == {name: (home, name) for name, home in paceline._HOMES.items()}


def test_every_public_name_is_there_and_listed() -> None:
    for name, home in paceline._HOMES.items():
        assert getattr(paceline, name) is getattr(import_module(home), name)
    assert set(paceline.__all__) <= set(dir(paceline))
    assert paceline.__all__ == sorted(paceline.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"^module 'paceline' has no attribute 'Trainr'$"):
        getattr(paceline, "Trainr")  # noqa: B009 (type checkers refuse the plain form, as they should)


def test_a_former_name_says_where_it_is_now() -> None:
    with pytest.raises(AttributeError, match=r"^paceline.DdpConfig is now paceline.compat.flodl.DdpConfig$"):
        getattr(paceline, "DdpConfig")  # noqa: B009
    for name, home in {"ArrayLoader": "data", "train": "compat.resnetimagenet", "EpochMetrics": "reports"}.items():
        with pytest.raises(AttributeError, match=rf"^paceline.{name} is now paceline.{home}.{name}$"):
            getattr(paceline, name)
