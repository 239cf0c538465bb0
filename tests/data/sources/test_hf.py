"""HF data sets, as users hand them over."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from worker_pool import WorkerPool

from paceline.data.fingerprint import is_hf_dataset
from paceline.data.sources.arrow import HfTable
from paceline.data.sources.base import Samples, as_source
from paceline.data.sources.streams import IterableStream

datasets = pytest.importorskip("datasets")


def indices(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@pytest.fixture
def dataset(tmp_path: Path) -> Any:
    """Ten rows, memory-mapped from a file as HF keeps them."""
    features = datasets.Features(
        {
            "tokens": datasets.List(datasets.Value("int32")),
            "score": datasets.Value("float64"),
            "text": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["no", "yes"]),
        }
    )
    rows = [{"tokens": [i, i + 1], "score": i / 4, "text": str(i), "label": i % 2} for i in range(10)]
    datasets.Dataset.from_list(rows, features=features).save_to_disk(tmp_path / "saved", num_shards=2)
    return datasets.load_from_disk(tmp_path / "saved")


def test_a_data_set_is_known_by_its_type() -> None:
    assert is_hf_dataset(datasets.Dataset.from_dict({"x": [1]}))
    assert not is_hf_dataset(datasets.Dataset.from_dict({"x": [1]}).to_iterable_dataset())
    assert not is_hf_dataset([1, 2])


def test_micro_batches_come_from_the_table(dataset: Any) -> None:
    source = as_source(dataset)
    assert isinstance(source, HfTable)
    assert len(source) == 10
    batch = source.read(indices(7, 2), 0, 0)
    assert torch.equal(batch["tokens"], torch.tensor([[7, 8], [2, 3]], dtype=torch.int32))
    assert torch.equal(batch["score"], torch.tensor([1.75, 0.5], dtype=torch.float64))
    assert batch["text"] == ["7", "2"]
    assert batch["label"].tolist() == [1, 0]


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d,
        lambda d: d.shuffle(seed=1),
        lambda d: d.filter(lambda row: row["label"] == 1),
        lambda d: d.select(range(4, 9)),
        lambda d: d.select([8, 1, 1, 5]),
        lambda d: d.shuffle(seed=1).select(range(3, 8)),
        lambda d: datasets.concatenate_datasets([d, d.select([5, 2, 3])]),
        lambda d: d.shard(2, 1).shuffle(seed=4),
    ],
    ids=["all", "shuffled", "filtered", "range", "picked", "shuffled range", "joined", "shard"],
)
def test_a_torch_format_gives_what_hf_gives(dataset: Any, change: Any) -> None:
    dataset = change(dataset).with_format("torch")
    source = as_source(dataset)
    assert isinstance(source, HfTable)
    wanted = [len(dataset) - 1, 0, 2, 3]
    batch, theirs = source.read(indices(*wanted), 0, 0), dataset[wanted]
    assert list(batch) == list(theirs)
    for name in ("tokens", "score", "label"):
        assert batch[name].dtype == theirs[name].dtype
        assert torch.equal(batch[name], theirs[name])
    assert batch["text"] == theirs["text"]


def test_only_the_formatted_columns_are_read(dataset: Any) -> None:
    batch = as_source(dataset.with_format("torch", columns=["label", "tokens"])).read(indices(1), 0, 0)
    assert set(batch) == {"label", "tokens"}
    assert list(as_source(dataset.remove_columns(["text", "score"])).read(indices(1), 0, 0)) == [
        "tokens",
        "label",
    ]


@pytest.mark.parametrize(
    ("change", "collate_fn"),
    [
        (lambda d: d.with_transform(lambda rows: {"n": [len(t) for t in rows["text"]]}), None),
        (lambda d: d.with_format("numpy"), None),
        (lambda d: d.with_format("torch", dtype=torch.float16), None),
        (lambda d: d.with_format("torch", columns=["label"], output_all_columns=True), None),
        (lambda d: d, lambda rows: rows),
    ],
    ids=["transform", "numpy", "torch with settings", "all columns", "collate_fn"],
)
def test_what_hf_would_do_more_is_left_to_hf(dataset: Any, change: Any, collate_fn: Any) -> None:
    source = as_source(change(dataset), collate_fn=collate_fn)
    assert isinstance(source, Samples)
    batch = source.read(indices(3, 4), 0, 0)
    if collate_fn is not None:
        assert batch == [dataset[3], dataset[4]]


def test_images_are_decoded_by_hf() -> None:
    images = [Image.new("RGB", (2, 2), (i, i, i)) for i in range(3)]
    for feature, column in [
        (datasets.Image(), images),
        (datasets.List(datasets.Image()), [[image] for image in images]),
        ({"inner": datasets.Image()}, [{"inner": image} for image in images]),
    ]:
        dataset = datasets.Dataset.from_dict({"image": column}, features=datasets.Features({"image": feature}))
        assert isinstance(as_source(dataset), Samples)


def test_another_process_reads_the_same(dataset: Any, pool: WorkerPool) -> None:
    source = as_source(dataset.shuffle(seed=3))
    here = source.read(indices(9, 0, 4), 0, 0)
    assert torch.equal(pickle.loads(pickle.dumps(source)).read(indices(9, 0, 4), 0, 0)["tokens"], here["tokens"])
    (there,) = pool.run(lambda: source.read(indices(9, 0, 4), 0, 0), 1)
    assert torch.equal(here["tokens"], there["tokens"])
    assert here["text"] == there["text"]


def test_rows_of_unequal_shapes_are_named_by_sample() -> None:
    dataset = datasets.Dataset.from_dict({"tokens": [[1], [2], [3, 4], [5]]}).select([3, 2, 1])
    text = r"samples 0 and 1 do not fit into one micro-batch: their shapes of column 'tokens' are \(1,\) and \(2,\)"
    with pytest.raises(ValueError, match=text):
        as_source(dataset).read(indices(0, 2, 1), 0, 0)


# Recognising what is a source


class Ready:
    seed = 0

    def __len__(self) -> int:
        return 1

    def read(self, indices: Any, epoch: int, position: int) -> Any:
        return None

    def with_seed(self, seed: int) -> Ready:
        seeded = Ready()
        seeded.seed = seed
        return seeded


def test_sources_are_taken_as_they_are_with_the_runs_seed(dataset: Any) -> None:
    assert isinstance(as_source(dataset), HfTable)
    assert as_source(Ready(), seed=5).seed == 5  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="collate_fn joins samples, but data is a Ready, which gives whole micro-b"):
        as_source(Ready(), collate_fn=list)


def test_a_data_set_with_a_read_method_is_a_data_set() -> None:
    class DataSetThatReads(Ready):
        def __getitem__(self, index: int) -> int:
            return index

    assert isinstance(as_source(DataSetThatReads()), Samples)


def test_a_divided_stream_comes_in_another_order_in_every_epoch(dataset: Any) -> None:
    stream = IterableStream(dataset.to_iterable_dataset(num_shards=2).shuffle(seed=3, buffer_size=5))
    order = [[[row["text"] for row in stream.open(shard, 2, epoch)] for shard in (0, 1)] for epoch in (0, 1, 0)]
    assert order[0] == order[2]
    assert order[0] != order[1]
    assert sorted(order[1][0] + order[1][1]) == [str(i) for i in range(10)]


def test_a_shard_knows_the_epoch() -> None:
    class Files:
        num_shards = 2
        epoch = 0

        def shard(self, num_shards: int, index: int) -> Any:
            return Files()

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Any:
            return iter([self.epoch])

    assert [list(IterableStream(Files()).open(1, 2, epoch)) for epoch in (0, 3)] == [[0], [3]]
