"""What users may keep their samples in, and what a micro-batch of it looks like."""

from __future__ import annotations

import random
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from paceline.data.sources.base import Columns, Cycle, Pair, Samples, as_source

X = torch.arange(20.0).reshape(10, 2)
Y = torch.arange(10) * 100


def indices(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def read(data: Any, *wanted: int, **settings: Any) -> Any:
    return as_source(data, **settings).read(indices(*wanted), 0, 0)


# Columns


@pytest.mark.parametrize("data", [X, X.numpy()], ids=["tensor", "array"])
def test_one_column(data: Any) -> None:
    source = as_source(data)
    assert isinstance(source, Columns)
    assert len(source) == 10
    assert torch.equal(source.read(indices(7, 0, 7), 0, 0), X[[7, 0, 7]])


@pytest.mark.parametrize(
    "data",
    [(X, Y), (X.numpy(), Y.numpy()), (X, Y.numpy()), TensorDataset(X, Y)],
    ids=["tensors", "arrays", "mixed", "TensorDataset"],
)
def test_two_columns_make_pairs(data: Any) -> None:
    assert isinstance(as_source(data), Columns)
    batch = read(data, 3, 1)
    assert type(batch) is Pair
    x, y = batch
    assert torch.equal(batch.x, X[[3, 1]])
    assert torch.equal(batch.y, Y[[3, 1]])
    assert x is batch.x
    assert y is batch.y


@pytest.mark.parametrize("data", [(X,), (X, Y, Y + 1), TensorDataset(X), TensorDataset(X, Y, Y + 1)])
def test_one_or_three_columns_make_tuples(data: Any) -> None:
    batch = read(data, 4)
    assert type(batch) is tuple
    columns = data.tensors if isinstance(data, TensorDataset) else data
    assert [part.tolist() for part in batch] == [column[[4]].tolist() for column in columns]


def test_columns_in_a_named_tuple_keep_its_type() -> None:
    for kind in (namedtuple("Pictures", ["image", "label"]), namedtuple("Weighed", ["image", "label", "weight"])):
        batch = read(kind(X, *[Y] * (len(kind._fields) - 1)), 3, 1)
        assert type(batch) is kind
        assert torch.equal(batch.image, X[[3, 1]])
        assert torch.equal(batch.label, Y[[3, 1]])


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_named_columns_make_dicts(kind: Callable[..., Any]) -> None:
    batch = read(kind(tokens=X, mask=Y.numpy()), 2, 9)
    assert list(batch) == ["tokens", "mask"]
    assert torch.equal(batch["tokens"], X[[2, 9]])
    assert torch.equal(batch["mask"], Y[[2, 9]])


def test_columns_give_rows_of_their_own() -> None:
    data = X.clone()
    read(data, 1, 2).zero_()
    assert torch.equal(data, X)


def test_a_read_only_memory_map_is_no_reason_to_warn(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    np.save(tmp_path / "x.npy", X.numpy())
    warn_always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # else only the first array of a process is warned about
    try:
        assert torch.equal(read(np.load(tmp_path / "x.npy", mmap_mode="r"), 8, 1), X[[8, 1]])
    finally:
        torch.set_warn_always(warn_always)
    assert not recwarn.list


# Samples


@pytest.mark.parametrize("kind", [list, tuple])
def test_pairs_in_a_list(kind: Callable[..., Any]) -> None:
    samples = [kind((x, int(y))) for x, y in zip(X, Y, strict=True)]
    batch = read(samples, 5, 6)
    assert type(batch) is Pair
    assert torch.equal(batch.x, X[[5, 6]])
    assert torch.equal(batch.y, Y[[5, 6]])


Point = namedtuple("Point", ["here", "there"])

# What the samples are -> what a micro-batch of two of them is, types included.
COLLATED: list[tuple[list[Any], Any]] = [
    ([1.5, 2.5], torch.tensor([1.5, 2.5], dtype=torch.float64)),
    ([X[0], X[1]], X[:2]),
    ([X[0].numpy(), X[1].numpy()], X[:2]),
    ([{"a": 1}, {"a": 2}], {"a": torch.tensor([1, 2])}),
    ([(1, 2, 3), (4, 5, 6)], [torch.tensor([1, 4]), torch.tensor([2, 5]), torch.tensor([3, 6])]),
    ([(1, 2), (4, 5)], Pair(torch.tensor([1, 4]), torch.tensor([2, 5]))),
    ([Point(1, 2), Point(4, 5)], Point(torch.tensor([1, 4]), torch.tensor([2, 5]))),
    (["two", "words"], ["two", "words"]),  # two samples, not a pair
]


@pytest.mark.parametrize(("samples", "expected"), COLLATED)
def test_samples_are_collated_as_torch_does(samples: list[Any], expected: Any) -> None:
    batch = read(samples, 0, 1)
    assert type(batch) is type(expected)
    assert str(batch) == str(expected)


class Squares(Dataset):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        assert type(index) is int
        return X[index], index**2


def test_a_map_style_data_set() -> None:
    batch = read(Squares(), 3, 9)
    assert torch.equal(batch.x, X[[3, 9]])
    assert batch.y.tolist() == [9, 81]


def test_anything_with_a_length_and_items_is_a_data_set() -> None:
    assert read(range(100, 110), 3, 4).tolist() == [103, 104]


def test_a_data_set_that_fetches_together_is_asked_once() -> None:
    class Together(Squares):
        asked: list[list[int]] = []  # noqa: RUF012

        def __getitems__(self, wanted: list[int]) -> list[Any]:
            self.asked.append(wanted)
            return [self[i] for i in wanted]

    data = Together()
    assert read(data, 2, 5).y.tolist() == [4, 25]
    assert data.asked == [[2, 5]]
    assert read(Subset(Squares(), [7, 8, 9]), 0, 2).y.tolist() == [49, 81]


def test_a_collate_function_of_the_users() -> None:
    assert read(["a", "b", "c"], 2, 0, collate_fn="+".join) == "c+a"
    # A TensorDataset's rows are samples again when they are to be joined by hand.
    assert read(TensorDataset(X, Y), 1, 0, collate_fn=lambda rows: [int(y) for _, y in rows]) == [100, 0]


def test_a_subclass_of_tensor_dataset_keeps_its_own_indexing() -> None:
    class Doubled(TensorDataset):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
            x, y = super().__getitem__(index)
            return 2 * x, y

    assert torch.equal(read(Doubled(X, Y), 1, 2).x, 2 * X[[1, 2]])


# Errors


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("data", "settings", "error", "text"),
    [
        (
            (X, Y[:9]),
            {},
            ValueError,
            r"the columns of data have \[10, 9\] rows: all columns need",
        ),
        ({"a": X, "b": Y[:1]}, {}, ValueError, r"the columns of data have \[10, 1\] rows"),
        (torch.tensor(3.0), {}, ValueError, "data is a single number: it needs one row per sample"),
        (np.array(3.0), {}, ValueError, "data is a single number: it needs one row per sample"),
        (np.array(["a"]), {}, TypeError, "data has an array of <U1 that cannot become a tensor: convert it, or pass"),
        (np.arange(3.0)[::-1], {}, ValueError, r"of float64 that cannot .* \(At least one stride in the given"),
        (np.ones(3, ">f4"), {}, ValueError, "data has an array of >f4 that cannot become a tensor"),
        ([], {}, ValueError, "data is empty: give at least one sample"),
        ((), {}, ValueError, "data is empty"),
        ({}, {}, ValueError, "data is empty"),
        (X[:0], {}, ValueError, "data is empty"),
        (TensorDataset(X[:0], Y[:0]), {}, ValueError, "data is empty"),
        (5, {}, TypeError, "data is a int, which has no __getitem__ and __len__: pass a list of samples, tensors or"),
        ("a.csv", {}, TypeError, "data is 'a.csv': for files pass a source, such as ArrowSource, TokenFile or Image"),
        (None, {}, TypeError, "data is a NoneType, which has no __getitem__ and __len__"),
        ((i for i in range(3)), {}, TypeError, "data is a generator, which has no __getitem__ and __len__"),
        (Endless(), {}, TypeError, "data is a Endless, which has no __getitem__ and __len__"),
        ({"x": [1, 2]}, {}, TypeError, "data is a dict of list: columns must all be tensors or arrays with one row"),
        ({"x": X, "n": 3}, {}, TypeError, "data is a dict of Tensor, int: columns must all be tensors or arrays"),
        ((X, [1] * 10), {}, TypeError, "data is a tuple of Tensor, list: columns must all be .* put them in a list"),
        ((X, torch.tensor(1)), {}, TypeError, "data is a tuple of Tensor, Tensor: columns must all be"),
        (((X[0], 1), (X[1], 0)), {}, TypeError, "data is a tuple of tuple, tuple: columns must all be .* in a list"),
        (([1.0, 2.0], [0, 1]), {}, TypeError, "data is a tuple of list, list: columns must all be"),
        (tuple("abcdefghijkl"), {}, TypeError, r"data is a tuple of (str, ){8}\.\.\.: columns must all be"),
        (X, {"collate_fn": list}, ValueError, "collate_fn joins samples, but data is given as whole columns: pass a"),
    ],
)
def test_data_that_cannot_be_used(data: Any, settings: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        as_source(data, **settings)


def test_a_data_frame_is_given_by_its_columns() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"x": [1.0, 2.0], "y": [0, 1]})
    with pytest.raises(TypeError, match=r"data is a DataFrame: pass its columns as arrays of numbers, such"):
        as_source(frame)
    batch = read({name: frame[name].to_numpy() for name in frame.columns}, 1)
    assert {name: column.tolist() for name, column in batch.items()} == {"x": [2.0], "y": [1]}


class Broken(Squares):
    def __getitem__(self, index: int) -> Any:
        if index == 6:
            raise OSError("truncated file")
        return torch.zeros(index)  # every sample of another size


class BrokenTogether(Broken):
    def __getitems__(self, wanted: list[int]) -> list[Any]:
        return [self[i] for i in wanted]


@pytest.mark.parametrize(
    ("data", "wanted", "error", "note"),
    [
        (Broken(), (6,), OSError, "while reading sample 6 of the data set"),
        (Broken(), (2, 6), OSError, "while reading sample 6 of the data set"),
        (BrokenTogether(), (2, 6), OSError, "while reading samples [2, 6] of the data set"),
    ],
)
def test_a_sample_that_fails_is_named(data: Any, wanted: tuple[int, ...], error: type[Exception], note: str) -> None:
    with pytest.raises(error) as caught:
        read(data, *wanted)
    assert caught.value.__notes__ == [note]


def test_samples_that_cannot_be_joined_are_named() -> None:
    class Unjoinable:
        pass

    with pytest.raises(TypeError) as caught:
        read([Unjoinable(), Unjoinable()], 0, 1)
    assert caught.value.__notes__ == ["while joining samples [0, 1] of the data set to a micro-batch"]


def test_samples_of_unequal_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"samples 0 and 1 do not fit into one micro-batch: .* a collate_fn that pads"):
        read([X[0], X[:2]], 0, 1)


# Random augmentation


class Noisy(Squares):
    """Draws from all three generators, and a different number of times for different samples."""

    def __getitem__(self, index: int) -> Any:
        for _ in range(index % 3):
            random.random()
        return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item(), float(index)])


class NoisyTogether(Noisy):
    def __getitems__(self, wanted: list[int]) -> list[Any]:
        return [self[i] for i in wanted]


def read_in_groups(data: Any, sizes: list[int], epoch: int = 0, seed: int = 0, **settings: Any) -> list[Any]:
    source, start, batches = as_source(data, seed=seed, **settings), 0, []
    for size in sizes:
        batches.append(source.read(np.arange(start, start + size), epoch, start))
        start += size
    return batches


def test_an_augmentation_belongs_to_its_sample() -> None:
    alone = torch.cat(read_in_groups(Noisy(), [1] * 10))
    assert torch.equal(torch.cat(read_in_groups(Noisy(), [4, 4, 2])), alone)
    assert torch.equal(torch.cat(read_in_groups(Noisy(), [10])), alone)
    shuffled = indices(3, 9, 0)
    assert torch.equal(as_source(Noisy()).read(shuffled, 0, 5), alone[shuffled])
    assert len({tuple(row[:3].tolist()) for row in alone}) == 10


@pytest.mark.parametrize("change", [{"epoch": 1}, {"seed": 1}])
def test_epoch_and_seed_change_the_augmentation(change: dict[str, int]) -> None:
    (before,), (after,) = read_in_groups(Noisy(), [10]), read_in_groups(Noisy(), [10], **change)
    assert (before[:, :3] != after[:, :3]).all()
    assert torch.equal(read_in_groups(Noisy(), [10], **change)[0], after)


@pytest.mark.parametrize(
    ("data", "settings"),
    [
        (NoisyTogether(), {}),
        (list(range(10)), {"collate_fn": lambda samples: torch.rand(len(samples), 2) + random.random()}),
    ],
    ids=["fetched together", "collated by the user"],
)
def test_what_is_handled_together_belongs_to_its_place(data: Any, settings: dict[str, Any]) -> None:
    first = read_in_groups(data, [4, 4, 2], **settings)
    again = [
        as_source(data, **settings).read(np.arange(start, stop), 0, start) for start, stop in [(8, 10), (4, 8), (0, 4)]
    ]
    assert all(torch.equal(a, b) for a, b in zip(first, reversed(again), strict=True))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], read_in_groups(data, [4], epoch=1, **settings)[0])


def test_joining_draws_by_place_whichever_samples_were_read_before() -> None:
    source = as_source(Noisy(), collate_fn=lambda _: torch.rand(()).item())
    assert source.read(indices(0, 1), 0, 4) == source.read(indices(7, 8, 9), 0, 4)
    assert source.read(indices(0, 1), 0, 4) != source.read(indices(0, 1), 0, 6)


@pytest.mark.parametrize("fails", [False, True])
def test_the_users_random_streams_go_on_undisturbed(fails: bool) -> None:
    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), torch.rand(()).item()]

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)
    expected = draw() + draw()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)
    drawn = draw()
    if fails:
        with pytest.raises(OSError, match="truncated"):
            read(Broken(), 6)
    else:
        read(Noisy(), 1, 2, 3)
    assert drawn + draw() == expected


def test_plain_samples_cost_no_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving and restoring three generators takes longer than reading a small sample."""
    monkeypatch.setattr(random, "getstate", lambda: pytest.fail("state was saved"))
    read([1, 2, 3], 0, 2)
    Cycle([1, 2, 3], 9, seed=0).read(indices(4), 0, 4)


# Over and over


def test_a_cycle_hands_out_items_as_they_are() -> None:
    items = [X, (1, "a"), None]
    source = Cycle(items, 8, seed=0)
    assert len(source) == 8
    assert [source.read(indices(i), 0, i) for i in range(8)] == [items[i % 3] for i in range(8)]
    assert isinstance(as_source(items), Samples), "as_source never cycles"


def test_a_cycle_draws_anew_in_every_pass() -> None:
    source = Cycle(Noisy(), 40, seed=0)
    rows = [source.read(indices(i), 0, i) for i in range(40)]
    assert torch.equal(Cycle(Noisy(), 40, seed=0).read(indices(17), 0, 17), rows[17])
    assert rows[7][3] == rows[17][3] == 7.0
    assert len({tuple(row[:3].tolist()) for row in rows}) == 40
    with pytest.raises(OSError, match="truncated") as caught:
        Cycle(Broken(), 40, seed=0).read(indices(16), 0, 16)
    assert caught.value.__notes__ == ["while reading sample 6 of the data set"]


def test_columns_in_channels_last_stay_so() -> None:
    images = torch.randn(10, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    batch = read(images, 4, 2)
    assert torch.equal(batch, images[[4, 2]])
    assert batch.is_contiguous(memory_format=torch.channels_last)
