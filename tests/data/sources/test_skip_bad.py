"""Going on without bad samples; and what does not fit together."""

from __future__ import annotations

import pickle
import random
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from paceline.data.errors import SampleError, naming_sample
from paceline.data.sources.base import as_source
from paceline.data.sources.collate import join
from paceline.data.sources.images import ImageFolder
from paceline.data.sources.skip_bad import SkipBad, Skipped


def indices(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


class Holey:
    """Samples that draw random numbers; some of them cannot be read."""

    def __init__(self, bad: set[int], length: int = 12) -> None:
        self.bad = bad
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = random.random()
        if index in self.bad:
            raise OSError(f"nothing at {index}")
        return torch.tensor([float(index), noise])


class HoleyTogether(Holey):
    def __getitems__(self, wanted: list[int]) -> list[torch.Tensor]:
        return [self[i] for i in wanted]


@pytest.mark.parametrize("kind", [Holey, HoleyTogether])
def test_bad_samples_are_left_out_and_recorded(kind: Any) -> None:
    skipped: list[Skipped] = []
    source = SkipBad(as_source(kind({2, 5})), skipped.append)
    assert len(source) == 12
    batch, count, skipped, _ = source.read_counted(indices(1, 5, 9, 2, 0), 0, 0)
    source.report_skipped(skipped)
    assert batch[:, 0].tolist() == [1, 9, 0]
    assert count == 3
    assert [(s.index, s.file, str(s.error)) for s in skipped] == [(5, None, "nothing at 5"), (2, None, "nothing at 2")]
    assert isinstance(skipped[0].error, OSError)


def test_good_samples_are_read_once() -> None:
    class Counting(Holey):
        reads = 0

        def __getitem__(self, index: int) -> torch.Tensor:
            self.reads += 1
            return super().__getitem__(index)

    data = Counting({7})
    batch, count, *_ = SkipBad(as_source(data)).read_counted(indices(0, 1, 2), 0, 0)
    assert (batch[:, 0].tolist(), count, data.reads) == ([0, 1, 2], 3, 3)


def test_nothing_is_left_of_a_micro_batch_of_bad_samples() -> None:
    source = SkipBad(as_source(Holey({2, 5})), lambda _: None)
    assert source.read_counted(indices(5, 2), 0, 0)[:2] == (None, 0)
    assert source.read(indices(2), 0, 0) is None


def test_samples_that_are_all_bad_are_an_error() -> None:
    source = SkipBad(as_source(Holey(set(range(100)), 100)))
    for first in range(0, 60, 4):
        assert len(source.read_counted(np.arange(first, first + 4), 0, first).skipped) == 4
    text = "the first 64 samples that were read are all bad, sample 63 by OSError: nothing at 63: check the code"
    with pytest.raises(SampleError, match=text):
        source.read_counted(np.arange(60, 64), 0, 60)


def test_after_one_good_sample_any_number_may_be_bad() -> None:
    source = SkipBad(as_source(Holey(set(range(1, 100)), 100)), lambda _: None)
    assert [source.read_counted(indices(i), 0, i).num_samples for i in range(100)] == [1] + [0] * 99


@given(bad=st.sets(st.integers(0, 11)), data=st.data())
def test_what_is_read_depends_on_the_arguments_alone(bad: set[int], data: st.DataObject) -> None:
    """The good samples come out as they would without the bad ones, augmentation included."""
    wanted = data.draw(st.lists(st.integers(0, 11), min_size=1, max_size=8))
    source = SkipBad(as_source(Holey(bad), seed=3), lambda _: None)
    good = [i for i in wanted if i not in bad]
    batch = source.read(indices(*wanted), 1, 4)
    if good:
        assert torch.equal(batch, as_source(Holey(set()), seed=3).read(indices(*good), 1, 4))
    else:
        assert batch is None


def test_without_a_callback_there_is_a_warning_for_each() -> None:
    with pytest.warns(UserWarning, match="sample 5 was skipped: nothing at 5"):
        SkipBad(as_source(Holey({5}))).read(indices(4, 5), 0, 0)


def test_samples_that_do_not_fit_together_are_not_skipped() -> None:
    source = SkipBad(as_source([torch.zeros(2), torch.zeros(3)]), lambda _: pytest.fail("skipped"))
    with pytest.raises(ValueError, match="samples 0 and 1 do not fit into one micro-batch"):
        source.read(indices(0, 1), 0, 0)


def test_lack_of_memory_is_no_fault_of_a_sample() -> None:
    class Large(Holey):
        def __getitem__(self, index: int) -> torch.Tensor:
            raise MemoryError

    with pytest.raises(MemoryError):
        SkipBad(as_source(Large(set())), lambda _: pytest.fail("skipped")).read(indices(0, 1), 0, 0)
    with pytest.raises(MemoryError), naming_sample(3, "a file"):
        raise MemoryError


def test_a_bad_image_is_recorded_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    for name in "abc":
        Image.new("RGB", (8, 8)).save(tmp_path / "c" / f"{name}.png")
    (tmp_path / "c" / "b.png").write_bytes(b"broken")
    skipped: list[Skipped] = []
    source = SkipBad(ImageFolder(tmp_path, 4), skipped.append)
    batch = source.read(indices(2, 1, 0), 0, 0)
    assert len(batch.x) == len(batch.y) == 2
    assert [(s.index, s.file) for s in skipped] == [(1, str(tmp_path / "c" / "b.png"))]
    drawn = ImageFolder(tmp_path, 4, seed=9).read(indices(2, 0), 0, 0)
    assert torch.equal(source.with_seed(9).read(indices(2, 1, 0), 0, 0).x, drawn.x)


def test_the_error_survives_the_way_between_processes() -> None:
    error = pickle.loads(pickle.dumps(SampleError("broken", index=3, file="a.png")))
    assert (str(error), error.index, error.file) == ("broken", 3, "a.png")


# Joining

Point = namedtuple("Point", ["here", "there"])
A, B = torch.zeros(2), torch.zeros(3)


@pytest.mark.parametrize(
    ("samples", "text"),
    [
        ([A, A, B], r"samples 10 and 12 do not fit into one micro-batch: their shapes are \(2,\) and \(3,\): make"),
        ([A.numpy(), B.numpy()], r"samples 10 and 11 .* shapes are \(2,\) and \(3,\)"),
        ([(A, 1), (B, 1)], r"their shapes of item 0 are \(2,\) and \(3,\)"),
        ([Point(A, A), Point(A, B)], r"their shapes of item 1 are \(2,\) and \(3,\)"),
        ([{"x": A}, {"x": B}], r"their shapes of 'x' are \(2,\) and \(3,\): .* or give a collate_fn that pads them"),
        ([{"x": [A, 1]}, {"x": [B, 1]}], r"their shapes of item 0 of 'x' are \(2,\) and \(3,\)"),
        ([[1, 2], [1, 2, 3]], r"their shapes are \(2,\) and \(3,\)"),
        ([A, torch.zeros(())], r"their shapes are \(2,\) and \(\)"),
    ],
)
def test_unequal_shapes_are_named(samples: list[Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        join(None, samples, [10, 11, 12][: len(samples)])


def test_other_failures_of_joining_stay_what_they_are() -> None:
    with pytest.raises(TypeError) as caught:
        join(None, [object(), object()], [3, 4])
    assert caught.value.__notes__ == ["while joining samples [3, 4] of the data set to a micro-batch"]
    texts = [{"x": object(), "y": "long"}, {"x": object(), "y": "longer"}]  # texts may differ in length
    with pytest.raises(TypeError, match="default_collate"):
        join(None, texts, [3, 4])


def test_an_error_of_a_collate_function_stays_what_it_is() -> None:
    def pad(samples: list[Any]) -> Any:
        return {"x": nn.utils.rnn.pad_sequence(samples)}["y"]

    with pytest.raises(KeyError, match="y"):
        join(pad, [A, B], [0, 1])


def test_a_collate_function_may_join_unequal_shapes() -> None:
    assert join(lambda samples: [len(s) for s in samples], [A, B], [0, 1]) == [2, 3]
