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
    "globl_batch: 3": ("trainer.globl_batch is an unknown setting: did you mean global_batch?"),
    "save_stepps: 3": ("trainer.save_stepps is an unknown setting: did you mean save_steps?"),
    "lr: 0.1": ("trainer.lr is an unknown setting: did you mean trainer.learning_rate?"),
    "batch_size: 8": ("trainer.batch_size is an unknown setting: did you mean trainer.global_batch?"),
    "output: runs": ("trainer.output is an unknown setting: did you mean output?"),
    "keep_last: 2": ("trainer.keep_last is an unknown setting: did you mean checkpoints.keep_last?"),
    "seed: true": ("trainer.seed is true: expected an integer"),
    "seed: 1.5": ("trainer.seed is 1.5: expected an integer"),
    "seed: 1e30": ("trainer.seed is 1e+30: expected an integer"),
    "seed: 99999999999999999999": ("trainer.seed is 99999999999999999999: expected a number of at most 63 bits"),
    "exact: yes": ("trainer.exact is 'yes': expected true or false"),
    "exact: 1": ("trainer.exact is 1: expected true or false"),
    "micro_batch: 0": ("trainer.micro_batch is 0: expected an integer >= 1 or null"),
    "micro_batch: '4'": ("trainer.micro_batch is '4': expected an integer >= 1 or null"),
    "log_every: null": ("trainer.log_every is null: expected an integer >= 1"),
    "timeout_s: 0": ("trainer.timeout_s is 0: expected a number > 0"),
    "timeout_s: true": ("trainer.timeout_s is true: expected a number > 0"),
    "timeout_s: .inf": ("trainer.timeout_s is inf: expected a number > 0"),
    "max_grad_norm: .nan": ("trainer.max_grad_norm is nan: expected a number >= 0 or null"),
    "ema: 1": ("trainer.ema is 1: expected a number > 0 and < 1 or null"),
    "precision: bf-16": ("trainer.precision is 'bf-16': expected fp32, bf16 or fp16; did you mean bf16?"),
    "precision: [bf16]": ("trainer.precision is a list of 1: expected fp32, bf16 or fp16"),
    "feed: {a: 1}": ("trainer.feed is a mapping of a: expected sharded, dispatched or null"),
    "shares: [1, -2]": ("trainer.shares[1] is -2: expected a number >= 0"),
    "shares: fast": ("trainer.shares is 'fast': expected a list of numbers >= 0, measured or equal"),
    "strategy: cadance": (
        "trainer.strategy is 'cadance': expected kind: gradients, kind: cadence, kind: averaging or kind: slow "
        "link; did "
        "you mean cadence?"
    ),
    "strategy: {every: 2}": (
        "trainer.strategy is a mapping of every: expected kind: gradients, kind: cadence, kind: averaging or "
        "kind: slow link"
    ),
    "strategy: {kind: 3}": "trainer.strategy.kind is 3: choose from gradients, cadence, averaging, slow link",
    "strategy: {kind: averaging, evry: 2}": (
        "trainer.strategy.evry is an unknown setting: did you mean every? (choose from every, "
        "first_step, overlap, compress, fragments, outer, divergence_threshold)"
    ),
    "strategy: {kind: averaging, outer: {factory: sgd}}": (
        "trainer.strategy.outer.factory is 'sgd': expected package.module:name"
    ),
    "early_stopping: {patience: 0}": ("trainer.early_stopping.patience is 0: expected an integer >= 1"),
    "dispatch_batches: 1": ("trainer.dispatch_batches is 1: expected true, false or auto"),
    "gradient_accumulation_steps: x, global_batch: null": (
        "trainer.gradient_accumulation_steps is 'x': expected an integer >= 1 or null"
    ),
    "save_strategy: sometimes": ("trainer.save_strategy is 'sometimes': expected no, steps or epoch"),
    "save_strategy: steps": ("trainer.save_strategy is 'steps': give the interval with save_steps"),
    "save_strategy: epoch, save_steps: 3": (
        "trainer.save_strategy is 'epoch', but an interval in steps is given at p.yaml:3:81: remove one"
    ),
    "save_dataset_state: false": (
        "trainer.save_dataset_state is false, but every checkpoint contains the position in the data: remove it"
    ),
    "lr_scheduler_type: cosin": (
        "trainer.lr_scheduler_type is 'cosin': expected constant, linear, cosine or null; did you mean cosine?"
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
        "p.yaml:3:1: trainer.epochs is missing: give the length of the run, with epochs or max_steps"
    ),
    "trainer: {epochs: 1, learning_rate: 1}": (
        "p.yaml:3:1: trainer.global_batch is missing: give the samples per optimizer step, or micro_batch and "
        "micro_batches_per_worker"
    ),
    "trainer: {epochs: 1, global_batch: 8}": (
        "p.yaml:1:1: optimizer is missing: give a factory, or trainer.learning_rate for AdamW"
    ),
    "trainer: {epochs: 1, global_batch: 8, micro_batch: 3, learning_rate: 1}": (
        "p.yaml:3:1: trainer is inconsistent: global_batch=8 is not a multiple of micro_batch=3: choose "
        "global_batch=6 or 9, or micro_batch=2 or 4"
    ),
    "trainer: {epochs: 1, global_batch: 8, learning_rate: 1, exact: true, strategy: averaging}": (
        "p.yaml:3:1: trainer is inconsistent: exact=True needs strategy='gradients': replicas "
        "differ between two averages"
    ),
    "trainer: {epochs: 1, micro_batches_per_worker: 2, learning_rate: 1}": (
        "p.yaml:3:22: trainer.micro_batches_per_worker requires trainer.micro_batch, the samples of a micro-batch"
    ),
    "trainer: {epochs: 1, batches_per_step: 2, micro_batch: 3, learning_rate: 1}": (
        "p.yaml:3:43: trainer.micro_batch has no effect: with batches_per_step, the data determines the batch size"
    ),
    "trainer: {epochs: 1, global_batch: 8, learning_rate: 1, eval_every: 5}": (
        "p.yaml:3:57: trainer.eval_every requires data.evaluation"
    ),
    "trainer: {epochs: 1, global_batch: 8, learning_rate: 1, eval_steps: 5}": (
        "p.yaml:3:57: trainer.eval_steps requires data.evaluation"
    ),
    "trainer: {epochs: 1, global_batch: 8, learning_rate: 1}\noptimizer: {factory: 'a:b'}": (
        "p.yaml:3:39: trainer.learning_rate has no effect: pass it to the optimizer as an argument"
    ),
    "trainer: {epochs: 1, global_batch: 8, learning_rate: 1, warmup_steps: 5}\nscheduler: {factory: 'a:b'}": (
        "p.yaml:3:57: trainer.warmup_steps has no effect: there is a scheduler section"
    ),
    "trainer: {max_steps: 5, global_batch: 8, learning_rate: 1, schedule: linear, warmup_steps: 5}": (
        "p.yaml:3:78: trainer.warmup_steps is too large: warmup_steps=5 must be < 5, the steps of the schedule"
    ),
    "trainer: {epochs: 1, global_batch: 8, learning_rate: 1}\ncheckpoints: {leave_out: [model]}": (
        "p.yaml:4:1: checkpoints is inconsistent: leave_out=('model',): choose other names, every "
        "checkpoint needs 'model' and 'engine'"
    ),
    "trainer: {epochs: 1, global_batch: 8, learning_rate: 1, save_strategy: no}\ncheckpoints: {resume: true}": (
        "p.yaml:4:15: checkpoints.resume has no effect: checkpoints.save is false"
    ),
    "trainer: {epochs: 1, global_batch: 8, learning_rate: 1, shares: [1, 2]}\nworkers: 3": (
        "p.yaml:3:1: trainer is inconsistent: shares=[1.0, 2.0] names 2 workers, the world has 3: give "
        "one number per worker"
    ),
    "trainer: {epochs: 1, global_batch: 8, learning_rate: 1, ema: 0.9, strategy: averaging}": (
        "p.yaml:3:57: trainer.ema does not work with averaging, where workers have different weights: remove one"
    ),
    "trainer: {epochs: 1, global_batch: 8, learning_rate: 1, scheduler_every: epoch}": (
        "p.yaml:3:57: trainer.scheduler_every has no effect: there is no scheduler section"
    ),
    "trainer: {epochs: 1, global_batch: 8, learning_rate: 1}\ndevices: []": (
        "p.yaml:4:1: devices is []: name at least one device, or remove the setting to use all"
    ),
}


@pytest.mark.parametrize("written", TOGETHER)
def test_settings_that_contradict_one_another_are_named(written: str, tmp_path: Path) -> None:
    assert error_of(tmp_path, REST + written) == TOGETHER[written]


# Whole files.
FILES = {
    "a: [1\nb: 2": ("p.yaml:2:2: invalid YAML: while parsing a flow sequence expected ',' or ']', but got ':'"),
    "- a\n- b": ("p.yaml:1:1: a project file must be a mapping: lines of `key: value`"),
    "a: 1\nb: 2\na: 3": ("p.yaml:3:1: duplicate key 'a', first at p.yaml:1:1: remove one"),
    "a: !!python/object/apply:os.system [ls]": (
        "p.yaml:1:4: the tag 'tag:yaml.org,2002:python/object/apply:os.system' is not allowed: remove it"
    ),
    "a: !!str 3": ("p.yaml:1:4: the tag 'tag:yaml.org,2002:str' is not allowed: remove it"),
    "1: a": ("p.yaml:1:1: a key must be a string: put it in quotes"),
    "? [a]\n: b": ("p.yaml:1:3: a key must be a string: put it in quotes"),
    "a: &a {b: 1}\nc:\n  <<: *a": ("p.yaml:3:3: merge keys (<<) are not supported: use `extends` or a variable"),
    "a: *b": ("p.yaml:1:4: invalid YAML: found undefined alias 'b'"),
    "a: &a [*a]": ("p.yaml:1:4: this alias refers to a value that contains it"),
    "a: 1\n---\nb: 2": (
        "p.yaml:2:1: invalid YAML: expected a single document in the stream but found another document"
    ),
    "a: \x07": "p.yaml:1:4: the character 0x7 is not allowed: remove it",
    'a: "\\ud800"': ("p.yaml:1:4: half of a surrogate pair is not a character: write both halves"),
    'a: "\\U00ffffff"': ("p.yaml:1:1: invalid YAML: chr() arg not in range(0x110000)"),
    'a: "\\Uffffffff"': ("p.yaml:1:1: invalid YAML: Python int too large to convert to C int"),
    "a: " + "9" * 5000: ("p.yaml:1:4: a number of 5000 digits is too long: the limit is 40"),
    "a: 0x" + "f" * 5000: ("p.yaml:1:4: a number of 5002 digits is too long: the limit is 40"),
    "a: " + "[" * 80 + "]" * 80: ("p.yaml:1:67: this is nested more than 64 levels deep: use fewer levels"),
    "a: &a " + "[" * 40 + "]" * 40 + "\nb: " + "[" * 40 + "*a" + "]" * 40: (
        "p.yaml:2:19: this is nested more than 64 levels deep: use fewer levels"
    ),
    "x: 1\n" * 60_000: ("p.yaml:1:1: the file is larger than the limit of 262144 bytes"),
    "": (
        "2 problems:\n"
        "  p.yaml:1:1: model is missing: builds the model (expected package.module:name or factory: "
        "package.module:name)\n"
        "  p.yaml:1:1: data is missing: training and evaluation data (expected a mapping of train, "
        "evaluation, collate, weight)"
    ),
    LEAST.replace("model:", "modle:"): (
        "2 problems:\n"
        "  p.yaml:1:1: model is missing: builds the model (expected package.module:name or factory: "
        "package.module:name)\n"
        "  p.yaml:1:1: modle is an unknown setting: did you mean model?"
    ),
    LEAST.replace('{factory: "parts:build_model"}', "parts.build_model"): (
        "p.yaml:1:1: model is 'parts.build_model': expected package.module:name or factory: "
        "package.module:name; did you mean parts:build_model?"
    ),
    LEAST.replace('{factory: "parts:build_model"}', "{arguments: {}}"): (
        "p.yaml:1:1: model is a mapping of arguments: expected package.module:name or factory: package.module:name"
    ),
    LEAST.replace('{factory: "parts:build_model"}', '{factory: "a:b", argumnts: {}}'): (
        "p.yaml:1:25: model.argumnts is an unknown setting: did you mean arguments? (choose from factory, arguments)"
    ),
    LEAST.replace('{factory: "parts:build_model"}', '{factory: "a:b", arguments: [1]}'): (
        "p.yaml:1:25: model.arguments is a list of 1: expected a mapping or null"
    ),
    LEAST.replace('{train: {factory: "parts:samples"}}', "{train: {paths: a}}"): (
        "p.yaml:2:8: data.train is a mapping of paths: expected package.module:name, factory: "
        "package.module:name, kind: tokens, kind: arrow, kind: images or kind: hf"
    ),
    LEAST.replace('{train: {factory: "parts:samples"}}', "{train: {kind: token, paths: a}}"): (
        "p.yaml:2:16: data.train.kind is 'token': did you mean tokens? (choose from tokens, arrow, images, hf)"
    ),
    LEAST.replace('{train: {factory: "parts:samples"}}', "{train: {kind: tokens, paths: [a, 3]}}"): (
        "2 problems:\n"
        "  p.yaml:2:8: data.train.length is missing: tokens per sample (expected an integer >= 1)\n"
        "  p.yaml:2:41: data.train.paths[1] is 3: expected a string"
    ),
    LEAST + "loggers: [csv, tensorbord]": (
        "p.yaml:4:16: loggers[1] is 'tensorbord': expected csv, tensorboard, wandb, mlflow, trackio, "
        "package.module:name, factory: package.module:name or a mapping of name, arguments; did you mean "
        "tensorboard?"
    ),
    LEAST + "checkpoints: {keep_best: loss}": (
        "p.yaml:4:15: checkpoints.keep_best is 'loss': expected a mapping of metric, count, mode or null"
    ),
    LEAST + "loggers: [{name: wandb, arguments: {a: {factory: b}}}]": (
        "p.yaml:4:41: loggers[0].arguments.a.factory is 'b': expected package.module:name"
    ),
    LEAST + "devices: 0": ("p.yaml:4:1: devices is 0: expected a list of integers >= 0, cpu or null"),
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
    assert str(caught.value) == f"{tmp_path}/none.yaml: cannot read the file: No such file or directory"


def test_a_file_that_says_a_billion_things_ends_in_an_error(tmp_path: Path) -> None:
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    message = error_of(tmp_path, "\n".join(lines))
    assert message == "p.yaml:5:1: anchors and variables expand this to more than 100000 values: use fewer"


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
