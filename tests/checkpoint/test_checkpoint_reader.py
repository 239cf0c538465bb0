"""Damage of any kind is found, named, and pointed past to the newest older checkpoint that is intact."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from checkpoint_state import components, job, same, save, save_steps, world

from paceline.checkpoint import manifest as manifest_module
from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.manifest import FORMAT_VERSION, Manifest, Pattern
from paceline.checkpoint.reader import Checkpoint, inspect, newest_intact, verify
from paceline.checkpoint.writer import Component


def load_all(folder: Path) -> dict[str, Any]:
    checkpoint = Checkpoint(folder)
    contents = checkpoint.manifest.contents.components
    return {f"{name}.{part}": checkpoint.load(name, part) for name in contents for part in checkpoint.parts(name)}


def flip_and_find(folder: Path, count: int, seed: int) -> None:
    """Flip one byte at random offsets over all files: verify and loading both notice, every time."""
    paths = sorted(folder.iterdir())
    sizes = [path.stat().st_size for path in paths]
    choose = random.Random(seed)
    for _ in range(count):
        (path,) = choose.choices(paths, sizes)
        content = path.read_bytes()
        offset, flip = choose.randrange(len(content)), choose.randrange(1, 256)
        path.write_bytes(content[:offset] + bytes([content[offset] ^ flip]) + content[offset + 1 :])
        where = f"{path.name} at {offset} flipped by {flip}"
        problems = verify(folder)
        assert len(problems) == 1, where
        assert str(path) in problems[0], where
        with pytest.raises(CheckpointError, match=path.name):
            load_all(folder)
        path.write_bytes(content)
    assert verify(folder) == []
    load_all(folder)


def test_one_flipped_byte_is_found(tmp_path: Path) -> None:
    (folder,) = save_steps(tmp_path, 1)
    flip_and_find(folder, 200, seed=0)


@pytest.mark.slow
def test_one_flipped_byte_is_found_a_thousand_times(tmp_path: Path) -> None:
    (folder,) = save_steps(tmp_path, 1)
    flip_and_find(folder, 1000, seed=1)


def test_every_byte_of_the_manifest_counts(tmp_path: Path) -> None:
    (folder,) = save_steps(tmp_path, 1)
    content = (folder / "manifest.json").read_bytes()
    for offset in range(len(content)):
        # 0x29 makes a tab of a space, which means the same to JSON.
        for flip in (0x01, 0x20, 0x29):
            with pytest.raises(CheckpointError):
                Manifest.parse(content[:offset] + bytes([content[offset] ^ flip]) + content[offset + 1 :])
    assert Manifest.parse(content).render() == content


def flip_last_byte(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


class Malicious:
    ran: Path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.ran}",)


def truncate(folder: Path) -> None:
    path = folder / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def put_pickle(name: str) -> Callable[[Path], None]:
    def put(folder: Path) -> None:
        Malicious.ran = folder.parent / "ran"
        (folder / name).write_bytes(pickle.dumps(Malicious()))

    return put


def symlink_outside(folder: Path) -> None:
    outside = folder.parent / "outside.safetensors"
    shutil.move(folder / "model.safetensors", outside)
    (folder / "model.safetensors").symlink_to(outside)


def hardlink_outside(folder: Path) -> None:
    (folder.parent / "outside.safetensors").hardlink_to(folder / "model.safetensors")


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (truncate, r"optimizer.safetensors has \d+ bytes, the manifest says \d+"),
    "missing": (lambda f: (f / "model.json").unlink(), "model.json is missing, the manifest lists it with"),
    "extra": (put_pickle("data.pkl"), "data.pkl is not in the manifest: remove it"),
    "extra of ours": (put_pickle("more.safetensors"), "more.safetensors is not in the manifest"),
    "a folder": (lambda f: (f / "more").mkdir(), "more is not in the manifest"),
    "pickle as weights": (put_pickle("model.safetensors"), r"model.safetensors has \d+ bytes, the manifest says"),
    "pickle as structure": (put_pickle("model.json"), r"model.json has \d+ bytes, the manifest says"),
    "pickle as manifest": (put_pickle("manifest.json"), "manifest.json is damaged"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing: .* is not a complete check"),
    "symlink": (symlink_outside, "model.safetensors is a symbolic link: replace it with the file"),
    "hard link": (hardlink_outside, "model.safetensors is a hard link, so it can be changed from outside"),
    "nothing": (shutil.rmtree, "step-00000003 does not exist or is not a folder"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_an_older_one_named(name: str, tmp_path: Path) -> None:
    older, damaged_too, folder = save_steps(tmp_path, 1, 2, 3)
    truncate(damaged_too)
    damage, message = DAMAGE[name]
    damage(folder)
    with pytest.raises(CheckpointError, match=f"{message}.* newest intact older checkpoint is {older}"):
        load_all(folder)
    (problem,) = verify(folder)
    with pytest.raises(CheckpointError, match=message):
        raise CheckpointError(problem)
    assert not (tmp_path / "ran").exists()
    assert newest_intact(tmp_path) == older
    assert same(load_all(older)["model.whole"], components(1)[0].state)


def test_a_newer_checkpoint_is_not_offered_for_a_damaged_one(tmp_path: Path) -> None:
    older, folder, newer = save_steps(tmp_path, 1, 3, 5)
    truncate(folder)
    assert newest_intact(tmp_path) == newer
    with pytest.raises(CheckpointError, match=f"newest intact older checkpoint is {older}$"):
        Checkpoint(folder)


def rewrite_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """As somebody who knows how the digest is made would."""
    path = folder / "manifest.json"
    content = json.loads(path.read_bytes())
    change(content)
    path.write_bytes(manifest_module._render(content))


def test_a_pickle_with_a_proper_manifest_is_not_run_either(tmp_path: Path) -> None:
    for name in ("model.safetensors", "model.json"):
        (folder,) = save_steps(tmp_path, 1)
        put_pickle(name)(folder)
        content = (folder / name).read_bytes()
        record = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        rewrite_manifest(folder, lambda m, name=name, record=record: m["files"].update({name: record}))
        with pytest.raises(CheckpointError, match=f"{name} (is damaged or not a safetensors file|cannot be used)"):
            load_all(folder)
        assert not (tmp_path / "ran").exists()


FORGED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "newer": (
        lambda m: m.update(format_version=FORMAT_VERSION + 1),
        "manifest.json has format version 2, this version of paceline reads up to 1: read it with a newer paceline",
    ),
    "older than any": (lambda m: m.update(format_version=0), "format version is 0, which does not exist"),
    "another format": (lambda m: m.update(format="other"), "its format is 'other'"),
    "a path": (lambda m: m["files"].update({"../x.json": m["files"]["model.json"]}), r"lists a file '\.\./x.json'"),
    "a file of nobody": (lambda m: m["files"].update({"x.json": m["files"]["model.json"]}), "belong to no component"),
    "another's file": (
        lambda m: m["components"]["model"]["parts"].update(whole=["model.json", "optimizer.safetensors"]),
        "'optimizer' has files .'optimizer.safetensors'. that are not its own",
    ),
    "unlisted": (lambda m: m["files"].pop("model.json"), "'model' has files .'model.json'. that are not its own"),
    "a component's name": (
        lambda m: m["components"].update({"../x": m["components"].pop("model")}),
        "component '../x' has parts",
    ),
    "pattern": (lambda m: m["components"]["model"].update(pattern="SHARDED"), "'SHARDED' is not a valid Pattern"),
    "size": (lambda m: m["files"]["model.json"].update(size="1"), "it lists 'model.json' as"),
    "step": (lambda m: m.update(step="1"), "step is '1', not a count"),
    "metrics": (lambda m: m.update(metrics=3), "metrics is 3, not a dict"),
    "lacking": (lambda m: m.pop("position"), "KeyError: 'position'"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_manifest_that_was_never_written_is_refused(name: str, tmp_path: Path) -> None:
    (folder,) = save_steps(tmp_path, 1)
    change, message = FORGED[name]
    rewrite_manifest(folder, change)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(folder)


def test_a_path_in_the_manifest_leads_nowhere(tmp_path: Path) -> None:
    (folder,) = save_steps(tmp_path, 1)
    shutil.copy(folder / "model.json", tmp_path / "x.json")

    def change(content: dict[str, Any]) -> None:
        content["files"]["../x.json"] = content["files"].pop("model.json")
        content["components"]["model"]["parts"]["whole"] = ["../x.json", "model.safetensors"]

    rewrite_manifest(folder, change)
    with pytest.raises(CheckpointError, match=r"it lists a file '\.\./x\.json'"):
        Checkpoint(folder)


def test_a_changed_manifest_says_both_digests(tmp_path: Path) -> None:
    (folder,) = save_steps(tmp_path, 1)
    path = folder / "manifest.json"
    digest = json.loads(path.read_bytes())["digest"]
    path.write_bytes(path.read_bytes().replace(b'"lr": 0.1', b'"lr": 0.2'))
    with pytest.raises(CheckpointError, match=f"it says its digest is '{digest}', its content gives '[0-9a-f]{{64}}'$"):
        inspect(folder)
    path.write_bytes(path.read_bytes().replace(b'"lr": 0.2', b'"lr":  0.1'))
    with pytest.raises(CheckpointError, match="but some of its bytes differ from how it was written"):
        inspect(folder)


def test_verify_tells_everything_at_once(tmp_path: Path) -> None:
    (folder,) = save_steps(tmp_path, 1)
    truncate(folder)
    (folder / "rng.rank-0.json").unlink()
    (folder / "notes.txt").write_text("x")
    flip_last_byte(folder / "model.safetensors")
    problems = verify(folder)
    assert [Path(problem.split()[0]).name for problem in problems] == [
        "rng.rank-0.json",
        "notes.txt",
        "optimizer.safetensors",
        "model.safetensors",
    ]


def test_a_checkpoint_that_is_deleted_meanwhile_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder,) = save_steps(tmp_path, 1)
    monkeypatch.setattr(Path, "iterdir", lambda path: iter([path / "gone.json"]))
    problem = f"{folder} cannot be read: No such file or directory"
    assert verify(folder) == [problem]
    with pytest.raises(CheckpointError, match=problem):
        inspect(folder)


def test_a_component_can_be_loaded_while_another_is_damaged(tmp_path: Path) -> None:
    (folder,) = save_steps(tmp_path, 1)
    flip_last_byte(folder / "optimizer.safetensors")
    checkpoint = Checkpoint(folder)
    assert same(checkpoint.load("model"), components(1)[0].state)
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors is damaged"):
        checkpoint.load("optimizer")


def test_each_node_loads_its_own_part_also_with_more_workers_per_node(tmp_path: Path) -> None:
    def part(rank: int) -> None:
        save(tmp_path, (Manifest(1), [Component("disk", {"rank": rank}, Pattern.PER_NODE)]), world(rank, 2, 0, 1))

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(part, range(2)))
    checkpoint = Checkpoint(tmp_path / "step-00000001")
    for rank, first in enumerate([0, 0, 1, 1]):
        assert checkpoint.load_own("disk", world(rank, 4, rank % 2, 2)) == {"rank": first}


def test_a_component_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    checkpoint = Checkpoint(save(tmp_path, job(1)))
    with pytest.raises(CheckpointError, match="has no component 'scaler': it has model, optimizer, rng"):
        checkpoint.load("scaler")


def test_a_checkpoint_can_be_moved_and_reached_by_a_link(tmp_path: Path) -> None:
    (folder,) = save_steps(tmp_path, 1)
    folder.rename(tmp_path / "best")
    (tmp_path / "link").symlink_to(tmp_path / "best")
    assert same(Checkpoint(tmp_path / "link").load("model"), components(1)[0].state)
