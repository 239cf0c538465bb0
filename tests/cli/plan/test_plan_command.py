"""`paceline plan`: from profiles to the answer, and one clear error for each mistake."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Ended, invoke
from made_runs import make_run
from train_project import write_project
from worker_pool import WorkerPool

from paceline.cli.commands import CommandError
from paceline.cli.config import load_project
from paceline.cli.plan import measure
from paceline.cli.watch.runs import RunEntry
from paceline.cli.watch.view import plan_of
from paceline.plan.predict import Device, Exchange, Link
from paceline.plan.profile import Profile, StepTimes, Subject
from paceline.run import probe

A = Profile(
    Subject("Net", 1000, 4000, 8),
    "A",
    2.0,
    (Device("A", 0.1, 0.01, 0.0, "A", cores=0.0),),
    (2,),
    exchange=Exchange(0.001, 1e6),
    num_samples=6400,
    global_batch=192,
    epochs=10,
)


@pytest.fixture
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """a.json, and b.json of a machine half as fast."""
    monkeypatch.chdir(tmp_path)
    slow = replace(A, host="old", devices=(Device("old", 0.2, 0.02, 0.0, "old"),), counts=(1,))
    (tmp_path / "a.json").write_text(A.to_json())
    (tmp_path / "b.json").write_text(slow.to_json())
    return tmp_path


def plan(*arguments: object) -> Ended:
    return invoke("plan", *arguments)


def answer(*arguments: object) -> dict[str, Any]:
    ended = plan(*arguments, "--json")
    assert ended.code == 0, ended.err
    answered: dict[str, Any] = json.loads(ended.out)
    return answered


@pytest.mark.usefixtures("profiles")
def test_the_answer_as_json() -> None:
    found = answer("--profile", "a.json", "--add", "B=b.json", "--link", "1Gbit", "--price", "A=2.10/h,B=0.40/h")
    usual = [each for each in found["alternatives"] if each["strategy"] == "gradients"]
    assert [each["workers"] for each in usual] == ["2xA,1xB", "2xA", "1xA,1xB", "1xA", "1xB"]
    alone = usual[3]
    assert alone["samples_per_s"] == pytest.approx(192 / (24 * 0.1 + 0.01))
    assert alone["epoch_s"] == pytest.approx(6400 / alone["samples_per_s"])
    assert alone["run_cost"] == pytest.approx(10 * alone["epoch_s"] / 3600 * 2.10)
    assert alone["interval"][0] < alone["samples_per_s"] < alone["interval"][1]
    assert usual[0]["shares"] == [10, 10, 4]
    assert found["advice"].startswith("Use 2xA,1xB with gradients: ")


def test_a_measured_link_needs_no_speed(profiles: Path) -> None:
    (profiles / "a.json").write_text(replace(A, link=Link.sold_as(1e9)).to_json())
    arguments = ("--profile", "a.json", "--add", "B=b.json", "--workers", "2xA,1xB")
    assert answer(*arguments) == answer(*arguments, "--link", "1Gbit")
    assert answer(*arguments) != answer(*arguments, "--link", "1Mbit")  # what is given counts


def test_the_name_of_a_profile_may_have_an_equals_sign(profiles: Path) -> None:
    for name in "ab":
        (profiles / f"{name}.json").rename(profiles / f"width=8,{name}.json")
    words = ("--profile", "width=8,a.json", "--link", "1Gbit")
    assert answer(*words, "--add", "width=8,b.json")["alternatives"][-1]["workers"] == "2xA,1xold"
    assert plan(*words, "--add", "B=nowhere.json").code == 2


def test_the_answer_goes_to_a_runs_folder(profiles: Path) -> None:
    files = make_run(profiles / "runs", "tiny")
    found = answer("--profile", "a.json", "--run", files.root)
    assert json.loads(files.plan.read_text()) == found
    shown = plan_of(RunEntry(files.root))
    assert shown is not None
    assert shown["advice"] == found["advice"]
    assert [row["workers"] for row in shown["alternatives"]] == [row["workers"] for row in found["alternatives"]]
    ended = plan("--profile", "a.json", "--run", profiles / "nowhere")
    assert (ended.code, ended.out) == (2, "")
    assert "nowhere is not a run's folder: choose one of `paceline runs`" in ended.err


def test_the_answer_as_a_table(profiles: Path) -> None:
    ended = plan("--profile", "a.json", "--device", "RTX 3060=0.4", "--workers", "2xA,1xRTX 3060")
    assert ended.code == 0, ended.err
    assert ended.out.startswith("workers")
    assert "2xA,1xRTX 3060" in ended.out
    assert "  1:20  " in ended.out  # an epoch of 1xA
    (profiles / "quick.json").write_text(replace(A, devices=(Device("A", 1e-5),), counts=(1,)).to_json())
    assert " 8 ms " in plan("--profile", "quick.json").out
    assert "\n\nUse 2xA" in ended.out


@pytest.mark.usefixtures("profiles")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "2xAA"], "unknown device 'AA': the profiles have 'A' (did you mean 'A'?). Add a profile with"),
        (["--price", "C=1/h"], "unknown device 'C': the profiles have 'A'"),
        (["--add", "other.json"], "the profile of old is of another model: micro_batch 4, not 8"),
        (["--add", "a.json"], "two machines are named 'A': rename one with --add NAME=FILE"),
        (["--add", "b.json"], "hosts 'A', 'old' need a link: give its speed, such as --link 1Gbit"),
        (["--add", "nowhere.json"], "there is no profile nowhere.json: make one with `paceline plan CONFIG --out"),
        (["--add", "broken.json"], "broken.json: it is not JSON"),
        (["--link", "fast"], "'fast': choose a speed such as 1Gbit or 100Mbit"),
        (["--workers", "0xA"], "'0xA': choose a number and a device, such as 2xA"),
        (["--device", "B"], "'B': choose a name and a factor"),
        (["--simulate", "long"], "'long': choose a time such as 90s, 20min or 1h"),
        (["--simulate", "1h", "--trace", "trace.jsonl"], "trace.jsonl, line 1: KeyError('worker'); an event is"),
        (["--global-batch", "12"], "global_batch=12 is not a multiple of micro_batch=8: choose global_batch=8 or 16"),
        (["--workers", "00xA"], "'00xA': choose a number and a device, such as 2xA"),
        (["--workers", "10001xA"], "10001 workers are too many: choose at most 10000"),
        (["--device", "A=0.5"], "two devices are named 'A': choose another name for --device A=0.5"),
        (["--device", "B=0.5", "--device", "B=1"], "two devices are named 'B': choose another name for --device B=1"),
        (["--price", "A=-1/h"], "'A=-1/h': choose a device and its price per hour, such as A=2.10/h"),
        (["--add", "numbers.json"], "numbers.json: the profile's devices=3 is not a list"),
        (["--steps", "5"], "--steps would be ignored with --profile: leave it out"),
        (["--find", "micro_batch"], "--profile would be ignored with --find: leave it out"),
        (["--trace", "trace.jsonl"], "--trace would be ignored without --simulate TIME: leave it out"),
        (["--failures", "1"], "--failures would be ignored without --simulate"),
        (["--simulate", "1h", "--price", "A=1/h"], "--price would be ignored with --simulate"),
        (["--simulate", "1h", "--trace", "nan.jsonl"], "nan.jsonl, line 1: ValueError('at_s=nan'); an event is"),
        (["--simulate", "1h", "--trace", "inf.jsonl"], "inf.jsonl, line 1: OverflowError('cannot convert"),
        (["--out", "nowhere/a.json"], "--out nowhere/a.json cannot be written: choose a file in a folder that exists"),
        (["small.yaml"], "CONFIG is to be measured, and --profile was measured before: give only one of them"),
    ],
)
def test_one_clear_error_for_each_mistake(arguments: list[str], message: str, profiles: Path) -> None:
    (profiles / "broken.json").write_text("{")
    (profiles / "trace.jsonl").write_text('{"at_s": 1}\n')
    (profiles / "nan.jsonl").write_text('{"at_s": NaN, "worker": 0, "event": "die"}\n')
    (profiles / "inf.jsonl").write_text('{"at_s": 1, "worker": Infinity, "event": "die"}\n')
    (profiles / "numbers.json").write_text(json.dumps(json.loads(A.to_json()) | {"devices": 3}))
    other = Profile.from_json((profiles / "b.json").read_text())
    (profiles / "other.json").write_text(replace(other, subject=replace(A.subject, micro_batch=4)).to_json())
    ended = plan("--profile", "a.json", *arguments)
    assert ended.code == 2, ended
    assert message in ended.err
    assert "Traceback" not in ended.err


def test_something_has_to_be_measured() -> None:
    ended = plan()
    assert (ended.code, ended.err) == (
        2,
        "paceline plan: CONFIG is missing: give a project file to measure, or --profile FILE\n",
    )


@pytest.mark.usefixtures("profiles")
def test_simulate() -> None:
    words = ["--profile", "a.json", "--workers", "40xA", "--link", "10Gbit", "--simulate", "10min", "--failures", "1"]
    found = answer(*words, "--replace-after", "1min")
    assert found["workers"] == 40
    assert found["deaths"] > 0
    assert 0.8 < found["of_predicted"] < 1
    ended = plan(*words)
    assert "deaths" in ended.out
    Path("end.jsonl").write_text('{"at_s": 90, "worker": 0, "event": "die"}\n')
    alone = plan("--profile", "a.json", "--workers", "1xA", "--simulate", "10min", "--trace", "end.jsonl")
    assert "steps; then no worker was left" in alone.out
    assert ended.code == 0


def test_a_project_is_measured_alone_and_in_company(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = write_project(tmp_path, "planned_parts")
    found = answer(config, "--steps", 3, "--name", "here", "--out", "here.json", "trainer.global_batch=16")
    profile = Profile.from_json(Path("here.json").read_text())
    assert profile.subject.exact
    assert profile.global_batch == 16
    assert (profile.num_samples, profile.epochs) == (80, 2)
    assert profile.exchange.seconds(2, 1000) > 0
    assert found["alternatives"][0]["samples_per_s"] > 0
    assert [path.name for path in tmp_path.iterdir() if path.is_dir() and path.name != "__pycache__"] == []


def test_gpus_that_are_left_out_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {0: "old", 2: "new", 3: "old"}
    monkeypatch.setattr(measure, "devices", lambda: [torch.device("cuda", index) for index in names])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[device.index])
    assert measure._kinds() == {"old": [0, 3], "new": [2]}


def test_a_containers_quota_is_what_its_workers_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = StepTimes((0.1,) * 2, (0.01,) * 2, (0.0,) * 2, (0.0,) * 2)
    monkeypatch.setattr(measure, "_launch", lambda *_: (replace(A, cores=64.0), times))
    monkeypatch.setattr(measure, "_kinds", lambda: {"cpu": [0, 1]})
    monkeypatch.setattr(probe, "cpu_quota", lambda: 1.5)
    project = load_project(write_project(tmp_path, "quota_parts"), ())
    assert measure.measure(project, 5).cores == 1.5


def test_workers_that_average_are_measured_with_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "profile", lambda run, *_: run.config.strategy)
    config = write_project(tmp_path, "averaging_parts")
    for strategy in ("{kind: averaging}", "slow link"):
        project = load_project(config, (f"trainer.strategy={strategy}", "trainer.exact=false")).resolve(1)
        assert measure._profile(project, None, 2) == "gradients"


def test_workers_are_measured_where_a_step_is_one_micro_batch(tmp_path: Path, pool: WorkerPool) -> None:
    config = write_project(tmp_path, "few_parts")
    with (tmp_path / "few_parts.py").open("a") as file:
        file.write(
            "def batches():\n"
            "    data_set = torch.utils.data.TensorDataset(*data())\n"
            "    return torch.utils.data.DataLoader(data_set, batch_sampler=[[0, 1, 2], [3, 4], [5, 6]])\n"
        )
    no_sizes = ("trainer.micro_batch=null", "trainer.global_batch=null")
    whole_batches = ("data.train.factory=few_parts:batches", "trainer.batches_per_step=1", *no_sizes)
    for overrides in (no_sizes[:1], whole_batches):
        project = load_project(config, overrides).resolve(1)
        (_, times), _ = pool.run(measure._profile, 2, project, None, 2)
        assert min(times.micro_batch_s) > 0


def test_find_micro_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_launch", lambda work, num_workers, *arguments: work(*arguments))  # noqa: ARG005
    config = write_project(tmp_path, "found_parts")
    ended = plan(config, "--find", "micro_batch")
    assert ended.code == 0, ended.err
    assert "set trainer.micro_batch=" in ended.out
    assert "is the fastest on 1 worker: " in ended.out  # as many as `paceline train` would start
    assert "global_batch=8 stays" in ended.out
    assert plan(config, "--find", "micro_batch", "--json").code == 0
    ended = plan(config, "--find", "micro_batch", "trainer.global_batch=10", "trainer.physical_batch=8")
    assert "global_batch=10 stays" in ended.out  # though not a multiple of the project's micro_batch
    cadence = ("trainer.strategy={kind: cadence}", "trainer.global_batch=null", "trainer.exact=false")
    ended = plan(config, "--find", "micro_batch", *cadence)
    assert "--find micro_batch divides the global batch: give trainer.global_batch" in ended.err


def test_only_the_projects_devices_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    config = write_project(tmp_path, "chosen_parts")

    def launch(*_: object) -> None:
        raise CommandError(f"visible: {os.environ['CUDA_VISIBLE_DEVICES']!r}")

    monkeypatch.setattr(measure, "_launch", launch)
    assert "visible: ''" in plan(config, "devices=cpu").err
    ended = plan(config, "devices=[99]")
    assert ended.code == 2
    assert "devices: this machine has 0 of the GPUs 99" in ended.err


def test_an_impossible_micro_batch_is_one_error(tmp_path: Path) -> None:
    config = write_project(tmp_path, "impossible_parts")
    ended = plan(config, "trainer.micro_batch=3")
    assert ended.code == 2
    assert "micro_batch" in ended.err
    assert "Traceback" not in ended.err
