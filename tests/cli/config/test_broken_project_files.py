"""Broken project files, each with what the user reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from project_files import LEAST, error_of, load

from paceline.cli.config import ConfigError, load_project

REST = LEAST.replace("trainer: {epochs: 1, global_batch: 8, learning_rate: 0.1}\n", "")
TRAINER = "trainer: {epochs: 1, global_batch: 8, learning_rate: 0.1, %s}\n"

# In `trainer`, beside what it needs: what is written, and what is said; the file's name and line stand before it.
IN_TRAINER = {
    "globl_batch: 3": "trainer.globl_batch is no setting: did you mean global_batch?",
    "save_stepps: 3": "trainer.save_stepps is no setting: did you mean save_steps?",
    "output: runs": "trainer.output is no setting: did you mean output?",
    "keep_last: 2": "trainer.keep_last is no setting: did you mean checkpoints.keep_last?",
    "seed: true": "trainer.seed is true: give a whole number",
    "seed: 1.5": "trainer.seed is 1.5: give a whole number",
    "seed: 1e30": "trainer.seed is 1e+30: give a whole number",
    "seed: 99999999999999999999": "trainer.seed is 99999999999999999999: give a number of at most 63 bits",
    "exact: yes": "trainer.exact is 'yes': give true or false",
    "exact: 1": "trainer.exact is 1: give true or false",
    "micro_batch: 0": "trainer.micro_batch is 0: give a whole number >= 1",
    "micro_batch: '4'": "trainer.micro_batch is '4': give a whole number >= 1 or null",
    "log_every: null": "trainer.log_every is null: give a whole number >= 1",
    "timeout_s: 0": "trainer.timeout_s is 0: give a number > 0",
    "timeout_s: true": "trainer.timeout_s is true: give a number > 0",
    "timeout_s: .inf": "trainer.timeout_s is inf: give a number > 0",
    "max_grad_norm: .nan": "trainer.max_grad_norm is nan: give a number >= 0",
    "ema: 1": "trainer.ema is 1: give a number > 0 and < 1",
    "precision: bf-16": "trainer.precision is 'bf-16': give fp32, bf16 or fp16; did you mean bf16?",
    "precision: [bf16]": "trainer.precision is a list of 1: give fp32, bf16 or fp16",
    "feed: {a: 1}": "trainer.feed is a mapping of a: give sharded, dispatched or null",
    "shares: [1, -2]": "trainer.shares[1] is -2: give a number > 0",
    "shares: fast": "trainer.shares is 'fast': give measured, equal or a list of numbers > 0",
    "strategy: cadance": (
        "trainer.strategy is 'cadance': give kind: gradients, kind: cadence or kind: averaging; did you mean cadence?"
    ),
    "strategy: {every: 2}": "trainer.strategy is a mapping of every: give kind: gradients, cadence or averaging",
    "strategy: {kind: 3}": "trainer.strategy.kind is 3: choose from gradients, cadence, averaging",
    "strategy: {kind: averaging, evry: 2}": (
        "trainer.strategy.evry is no setting: did you mean every? (choose from every, first_step, overlap, transfer, "
        "outer, divergence_threshold)"
    ),
    "strategy: {kind: averaging, outer: {factory: sgd}}": (
        "trainer.strategy.outer.factory is 'sgd', which names no function of a module, package.module:name"
    ),
    "early_stopping: {patience: 0}": "trainer.early_stopping.patience is 0: give a whole number >= 1",
    "dispatch_batches: 1": "trainer.dispatch_batches is 1: give true or false",
    "gradient_accumulation_steps: x, global_batch: null": (
        "trainer.gradient_accumulation_steps is 'x': give a whole number >= 1 or null"
    ),
    "save_strategy: sometimes": "trainer.save_strategy is 'sometimes': give no, steps or epoch",
    "save_strategy: steps": "trainer.save_strategy is 'steps': say how many with save_steps",
    "save_strategy: epoch, save_steps: 3": (
        "trainer.save_strategy is 'epoch', and steps are given at p.yaml:3:81: leave one out"
    ),
    "save_dataset_state: false": (
        "trainer.save_dataset_state is false, but every checkpoint holds the data's position: leave it out"
    ),
    "lr_scheduler_type: cosin": (
        "trainer.lr_scheduler_type is 'cosin': give constant, linear, cosine or null; did you mean cosine?"
    ),
}


@pytest.mark.parametrize("written", IN_TRAINER)
def test_a_wrong_setting_is_named_with_its_place_and_what_is_allowed(written: str, tmp_path: Path) -> None:
    given = TRAINER % written
    if "global_batch: null" in written:
        given = given.replace("global_batch: 8, ", "")
    place, _, message = error_of(tmp_path, REST + given).partition(": ")
    assert message == IN_TRAINER[written]
    name, line, column = place.split(":")
    assert (name, line) == ("p.yaml", "3")
    key = message.split()[0].rpartition(".")[2]
    item = "-2"  # the second of the shares, which has no key
    assert given[int(column) - 1 :].startswith(item if "[" in key else key)


# What settings say together: places are those of the section or of the setting that would be ignored.
TOGETHER = {
    "trainer: {global_batch: 8, learning_rate: 1}": (
        "p.yaml:3:1: trainer.epochs is missing: say how long to train, with epochs or max_steps"
    ),
    "trainer: {epochs: 1, learning_rate: 1}": (
        "p.yaml:3:1: trainer.global_batch is missing: give the samples per optimizer step, or micro_batch and "
        "micro_batches_per_worker"
    ),
    "trainer: {epochs: 1, global_batch: 8}": (
        "p.yaml:1:1: optimizer is missing: give a factory, or trainer.learning_rate for AdamW"
    ),
    "trainer: {epochs: 1, global_batch: 8, micro_batch: 3, learning_rate: 1}": (
        "p.yaml:3:1: trainer does not fit together: global_batch=8 is not a multiple of micro_batch=3: choose "
        "global_batch=6 or 9, or micro_batch=2 or 4"
    ),
    "trainer: {epochs: 1, global_batch: 8, learning_rate: 1, exact: true, strategy: averaging}": (
        "p.yaml:3:1: trainer does not fit together: exact=True needs strategy='gradients': replicas differ "
        "between two averages"
    ),
    "trainer: {epochs: 1, micro_batches_per_worker: 2, learning_rate: 1}": (
        "p.yaml:3:22: trainer.micro_batches_per_worker needs trainer.micro_batch: the samples of a micro-batch"
    ),
    "trainer: {epochs: 1, batches_per_step: 2, micro_batch: 3, learning_rate: 1}": (
        "p.yaml:3:43: trainer.micro_batch would be ignored: with batches_per_step batches come as they are"
    ),
    "trainer: {epochs: 1, global_batch: 8, learning_rate: 1, eval_every: 5}": (
        "p.yaml:3:57: trainer.eval_every needs something to evaluate on: give data.evaluation"
    ),
    "trainer: {epochs: 1, global_batch: 8, learning_rate: 1, eval_steps: 5}": (
        "p.yaml:3:57: trainer.eval_steps needs something to evaluate on: give data.evaluation"
    ),
    "trainer: {epochs: 1, global_batch: 8, learning_rate: 1}\noptimizer: {factory: 'a:b'}": (
        "p.yaml:3:39: trainer.learning_rate would be ignored: give it to the optimizer as an argument"
    ),
    "trainer: {epochs: 1, global_batch: 8, learning_rate: 1, warmup_steps: 5}\nscheduler: {factory: 'a:b'}": (
        "p.yaml:3:57: trainer.warmup_steps would be ignored: there is a scheduler section"
    ),
    "trainer: {max_steps: 5, global_batch: 8, learning_rate: 1, schedule: linear, warmup_steps: 5}": (
        "p.yaml:3:78: trainer.warmup_steps does not fit: warmup_steps=5 leave nothing of a schedule of 5 steps: "
        "warm up for fewer"
    ),
    "trainer: {epochs: 1, global_batch: 8, learning_rate: 1}\ncheckpoints: {leave_out: [model]}": (
        "p.yaml:4:1: checkpoints does not fit together: leave_out=('model',): give a list of names, without 'model' "
        "and 'engine', which every checkpoint needs"
    ),
    "trainer: {epochs: 1, global_batch: 8, learning_rate: 1, save_strategy: no}\ncheckpoints: {resume: true}": (
        "p.yaml:4:15: checkpoints.resume would be ignored: checkpoints.save is false"
    ),
    "trainer: {epochs: 1, global_batch: 8, learning_rate: 1, shares: [1, 2]}\nworkers: 3": (
        "p.yaml:3:1: trainer does not fit together: shares=[1.0, 2.0] names 2 workers, the world has 3: "
        "give one number per worker"
    ),
    "trainer: {epochs: 1, global_batch: 8, learning_rate: 1, ema: 0.9, strategy: averaging}": (
        "p.yaml:3:57: trainer.ema does not go with averaging, where every worker has weights of its own: leave one out"
    ),
    "trainer: {epochs: 1, global_batch: 8, learning_rate: 1, scheduler_every: epoch}": (
        "p.yaml:3:57: trainer.scheduler_every would be ignored: there is no scheduler section"
    ),
    "trainer: {epochs: 1, global_batch: 8, learning_rate: 1}\ndevices: []": (
        "p.yaml:4:1: devices is []: name at least one, or leave it out for all"
    ),
}


@pytest.mark.parametrize("written", TOGETHER)
def test_settings_that_contradict_one_another_are_named(written: str, tmp_path: Path) -> None:
    assert error_of(tmp_path, REST + written) == TOGETHER[written]


# Whole files.
FILES = {
    "a: [1\nb: 2": "p.yaml:2:2: this is not YAML: while parsing a flow sequence expected ',' or ']', but got ':'",
    "- a\n- b": "p.yaml:1:1: a project file is a mapping, lines of `key: value`",
    "a: 1\nb: 2\na: 3": "p.yaml:3:1: the key 'a' is there twice, first at p.yaml:1:1: remove one",
    "a: !!python/object/apply:os.system [ls]": (
        "p.yaml:1:4: the tag 'tag:yaml.org,2002:python/object/apply:os.system' is not allowed: leave it out"
    ),
    "a: !!str 3": "p.yaml:1:4: the tag 'tag:yaml.org,2002:str' is not allowed: leave it out",
    "1: a": "p.yaml:1:1: a key must be a text: put it in quotes",
    "? [a]\n: b": "p.yaml:1:3: a key must be a text: put it in quotes",
    "a: &a {b: 1}\nc:\n  <<: *a": "p.yaml:3:3: merge keys (<<) are not read: use `extends` or a variable",
    "a: *b": "p.yaml:1:4: this is not YAML: found undefined alias 'b'",
    "a: &a [*a]": "p.yaml:1:4: this alias refers to what it is a part of",
    "a: 1\n---\nb: 2": (
        "p.yaml:2:1: this is not YAML: expected a single document in the stream but found another document"
    ),
    "a: \x07": "p.yaml:1:4: the character 0x7 is not allowed: remove it",
    'a: "\\ud800"': "p.yaml:1:4: half of a surrogate pair is no character: write the whole one",
    'a: "\\U00ffffff"': "p.yaml:1:1: this is not YAML: chr() arg not in range(0x110000)",
    'a: "\\Uffffffff"': "p.yaml:1:1: this is not YAML: Python int too large to convert to C int",
    "a: " + "9" * 5000: "p.yaml:1:4: a number of 5000 digits is too long",
    "a: 0x" + "f" * 5000: "p.yaml:1:4: a number of 5002 digits is too long",
    "a: " + "[" * 80 + "]" * 80: "p.yaml:1:67: this is nested more than 64 levels deep: write it flatter",
    "a: &a " + "[" * 40 + "]" * 40 + "\nb: " + "[" * 40 + "*a" + "]" * 40: (
        "p.yaml:2:19: this is nested more than 64 levels deep: write it flatter"
    ),
    "x: 1\n" * 60_000: "p.yaml:1:1: the file has more than 262144 bytes: a project file is small",
    "": (
        "2 problems:\n"
        "  p.yaml:1:1: model is missing: what makes the model (give package.module:name or a factory)\n"
        "  p.yaml:1:1: data is missing: what to train and evaluate on (give a mapping of train, evaluation, collate, "
        "weight)"
    ),
    LEAST.replace("model:", "modle:"): (
        "2 problems:\n"
        "  p.yaml:1:1: modle is no setting: did you mean model?\n"
        "  p.yaml:1:1: model is missing: what makes the model (give package.module:name or a factory)"
    ),
    LEAST.replace('{factory: "parts:build_model"}', "parts.build_model"): (
        "p.yaml:1:1: model is 'parts.build_model', which names no function of a module, package.module:name: did you "
        "mean parts:build_model?"
    ),
    LEAST.replace('{factory: "parts:build_model"}', "{arguments: {}}"): (
        "p.yaml:1:1: model has no factory: give factory: package.module:name"
    ),
    LEAST.replace('{factory: "parts:build_model"}', '{factory: "a:b", argumnts: {}}'): (
        "p.yaml:1:25: model.argumnts is no setting: did you mean arguments? (choose from factory, arguments)"
    ),
    LEAST.replace('{factory: "parts:build_model"}', '{factory: "a:b", arguments: [1]}'): (
        "p.yaml:1:25: model.arguments is a list of 1: give a mapping or null"
    ),
    LEAST.replace('{train: {factory: "parts:samples"}}', "{train: {paths: a}}"): (
        "p.yaml:2:8: data.train is a mapping of paths: give kind: tokens, arrow, images or hf, or a factory"
    ),
    LEAST.replace('{train: {factory: "parts:samples"}}', "{train: {kind: token, paths: a}}"): (
        "p.yaml:2:16: data.train.kind is 'token': did you mean tokens? (choose from tokens, arrow, images, hf)"
    ),
    LEAST.replace('{train: {factory: "parts:samples"}}', "{train: {kind: tokens, paths: [a, 3]}}"): (
        "2 problems:\n"
        "  p.yaml:2:8: data.train.length is missing: tokens of a sample (give a whole number >= 1)\n"
        "  p.yaml:2:41: data.train.paths[1] is 3: give text"
    ),
    LEAST + "loggers: [csv, tensorbord]": (
        "p.yaml:4:16: loggers[1] is 'tensorbord': give csv, tensorboard, wandb, mlflow, a factory or a mapping of "
        "name, arguments; did you mean tensorboard?"
    ),
    LEAST + "checkpoints: {keep_best: loss}": (
        "p.yaml:4:15: checkpoints.keep_best is 'loss': give a mapping of metric, count, mode or null"
    ),
    LEAST + "loggers: [{name: wandb, arguments: {a: {factory: b}}}]": (
        "p.yaml:4:41: loggers[0].arguments.a.factory is 'b', which names no function of a module, package.module:name"
    ),
    LEAST + "devices: 0": "p.yaml:4:1: devices is 0: give a list of whole numbers >= 0, cpu or null",
}


@pytest.mark.parametrize("text", FILES, ids=range(len(FILES)))
def test_a_broken_file_is_explained(text: str, tmp_path: Path) -> None:
    assert error_of(tmp_path, text) == FILES[text]


def test_a_file_that_is_not_utf_8_is_named_with_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_bytes(b"a: 1\nname: caf\xe9\n")
    with pytest.raises(ConfigError) as caught:
        load_project(path)
    assert str(caught.value) == f"{path}:2:10: byte 0xe9 is not UTF-8: save the file as UTF-8"


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + LEAST.encode())
    assert load_project(path).settings.trainer.epochs == 1


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_project(tmp_path / "none.yaml")
    assert str(caught.value) == f"{tmp_path}/none.yaml: the file cannot be read: No such file or directory"


def test_a_file_that_says_a_billion_things_ends_in_an_error(tmp_path: Path) -> None:
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    message = error_of(tmp_path, "\n".join(lines))
    assert message == "p.yaml:5:1: with what it refers to this has more than 100000 values: write less"


def test_anchors_are_read_as_what_they_stand_for(tmp_path: Path) -> None:
    text = LEAST.replace("epochs: 1", "epochs: &n 2").replace("global_batch: 8", "global_batch: *n")
    trainer = load(tmp_path, text).settings.trainer
    assert (trainer.epochs, trainer.global_batch) == (2, 2)


def test_ten_problems_are_shown_in_the_order_of_the_file_and_the_rest_counted(tmp_path: Path) -> None:
    text = LEAST + "\n".join(f"key_{i}: 1" for i in range(13))
    lines = error_of(tmp_path, text).splitlines()
    assert lines[0] == "13 problems:"
    assert [line.split(":")[1] for line in lines[1:11]] == [str(line) for line in range(4, 14)]
    assert lines[11:] == ["  and 3 more"]
