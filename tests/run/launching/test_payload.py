from __future__ import annotations

import functools
import importlib.util
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from paceline.run.launching.payload import save_call, save_result
from paceline.run.launching.worker import load


class Sampler:
    def __init__(self, lock: Any) -> None:
        self.options = {"seed": 1, "guard": [0, lock]}

    def draw(self) -> None:
        return


def closing_over(lock: Any) -> Callable[[], Any]:
    return lambda: lock


LOCK = threading.Lock()


@pytest.mark.parametrize(
    ("fn", "args", "kwargs", "name"),
    [
        (len, (1, LOCK), {}, "args[1]"),
        (len, (), {"x": LOCK}, "kwargs['x']"),
        (len, (), {"x": Sampler(LOCK)}, "kwargs['x'].options['guard'][1]"),
        (closing_over(LOCK), (), {}, "fn's variable 'lock'"),
        (functools.partial(len, LOCK), (), {}, "fn.args[0]"),
        (Sampler(LOCK).draw, (), {}, "fn.__self__.options['guard'][1]"),
        (len, ((x for x in "a"),), {}, "args[0]"),
    ],
)
def test_an_unpicklable_part_is_named(
    tmp_path: Path, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any], name: str
) -> None:
    with pytest.raises(TypeError) as caught:
        save_call(tmp_path / "call", fn, args, kwargs)
    assert str(caught.value).startswith(f"{name} cannot be sent to the workers: create it inside the function instead")
    assert "cannot pickle" in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_an_unpicklable_result_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"^the return value of rank 0\['model'\] cannot be sent to the caller: return"):
        save_result(tmp_path / "result", {"loss": 1.0, "model": LOCK})


def test_a_full_disk_is_no_pickling_error(tmp_path: Path) -> None:
    (tmp_path / "result.new").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        save_result(tmp_path / "result.pkl", bytes(1 << 20))


def test_functions_of_a_module_loaded_from_a_path_travel_by_value(tmp_path: Path) -> None:
    source = tmp_path / "recipe.py"
    source.write_text(
        "class Answer:\n    value = 42\n\ndef answer(): return helper()\n\ndef helper(): return Answer.value\n"
    )
    spec = importlib.util.spec_from_file_location("recipe_from_a_path", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    try:
        spec.loader.exec_module(module)
        save_call(tmp_path / "call", module.answer, (), {})
        assert module.__name__ not in cloudpickle.list_registry_pickle_by_value()
    finally:
        del sys.modules[module.__name__]
    reader = f"import pickle; fn, args, kwargs = pickle.load(open({str(tmp_path / 'call')!r}, 'rb')); print(fn())"
    assert subprocess.run([sys.executable, "-c", reader], capture_output=True, check=True).stdout == b"42\n"


def test_functions_of_an_importable_module_travel_by_reference(tmp_path: Path) -> None:
    save_call(tmp_path / "call", pickle.dumps, (1,), {"protocol": 2})
    assert load(tmp_path / "call") == (pickle.dumps, (1,), {"protocol": 2})
    save_call(tmp_path / "call", closing_over, (), {})
    assert load(tmp_path / "call")[0] is closing_over


def test_a_file_is_there_when_it_is_whole(tmp_path: Path) -> None:
    """The launcher loads the result of a rank 0 that was killed after its work."""
    with pytest.raises(TypeError, match=r"return value of rank 0\[1\]"):
        save_result(tmp_path / "result.pkl", [1, LOCK])
    assert not (tmp_path / "result.pkl").exists()
