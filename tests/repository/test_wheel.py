"""The wheel holds the whole package, marked as typed, and nothing but the package."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100)
    assert done.returncode == 0, done.stdout
    (wheel,) = out.glob("paceline-*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_holds_every_source_file(wheel_names: set[str]) -> None:
    sources = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src" / "paceline").rglob("*")
        if path.suffix in {".py", ".typed"}
    }
    assert "paceline/py.typed" in sources
    assert sources <= wheel_names


def test_holds_nothing_else(wheel_names: set[str]) -> None:
    others = {name for name in wheel_names if not name.startswith("paceline/") and ".dist-info/" not in name}
    assert not others


def test_every_package_has_an_init(wheel_names: set[str]) -> None:
    """import-linter and mypy look for packages by it; a folder without one would go unchecked."""
    folders = {Path(name).parent for name in wheel_names if name.startswith("paceline/") and name.endswith(".py")}
    assert {str(folder / "__init__.py") for folder in folders} <= wheel_names
