"""Runs `paceline plan`: from profiles to predictions and advice."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from paceline.cli import commands as cli
from paceline.cli.commands import CommandError
from paceline.observe import formats
from paceline.observe.run_files import RunFiles, write_json
from paceline.plan import predict
from paceline.plan.advice import Alternative, Kind, advice, alternatives
from paceline.plan.cadence import Cadence
from paceline.plan.epoch import Steps
from paceline.plan.profile import Profile, check_combinable

# Predictions and simulations of more would take minutes.
_MAX_WORKERS = 10_000
_NO_MICRO_BATCH = ("trainer.micro_batch=null", "trainer.physical_batch=null")
_HEADER = ("workers", "strategy", "samples/s", "between", "of sum", "epoch", "cost", "run", "cost", "shares", "limit")


@dataclass(frozen=True)
class Situation:
    """What to predict: the workload, the workers, and the hardware between them."""

    workload: predict.Workload
    kinds: Sequence[Kind]
    hardware: predict.Hardware


def run(options: argparse.Namespace) -> int:
    if options.run_folder is not None and not RunFiles(options.run_folder).status.is_file():
        raise CommandError(f"--run {options.run_folder} is not a run's folder: choose one of `paceline runs`", 2)
    if options.out is not None and (options.out.is_dir() or not os.access(options.out.parent, os.W_OK)):
        raise CommandError(f"--out {options.out} cannot be written: choose a file in a folder that exists", 2)
    if options.find is not None:
        return _find(options)
    own = _own_profile(options)
    if options.out is not None:
        options.out.write_text(own.to_json(), encoding="utf-8")
    try:
        situation = _situation(options, own)
        if options.simulate is not None:
            from paceline.cli.plan.simulate import simulate

            return simulate(options, situation)
        found = alternatives(situation.workload, situation.kinds, situation.hardware)
    except ValueError as error:
        raise CommandError(str(error), 2) from error
    answer = {"subject": vars(own.subject), "alternatives": list(map(_entry, found)), "advice": advice(found)}
    if options.run_folder is not None:
        write_json(RunFiles(options.run_folder).plan, answer)
    if options.json:
        cli.print_json(answer)
    else:
        _print(found)
    return 0


def _own_profile(options: argparse.Namespace) -> Profile:
    if options.profile is not None:
        if options.config is not None or options.overrides:
            raise CommandError("CONFIG is to be measured, and --profile was measured before: give only one of them", 2)
        profile = _read_profile(options.profile)
    else:
        from paceline.cli.plan.measure import measure

        profile = measure(_project(options), options.steps)
    return profile.renamed(options.name) if options.name else profile


def _project(options: argparse.Namespace) -> Any:
    from paceline.cli.config import ConfigError, load_project
    from paceline.cli.train.command import checked, num_workers_of

    if options.config is None:
        raise CommandError("CONFIG is missing: give a project file to measure, or --profile FILE", 2)
    try:
        try:
            project = load_project(options.config, options.overrides)
        except ConfigError:
            if options.find is None:
                raise
            # The micro-batch that is to be found may not fit the global batch.
            project = load_project(options.config, [*options.overrides, *_NO_MICRO_BATCH])
        return checked(project).resolve(num_workers_of(project))
    except ValueError as error:
        raise CommandError(str(error), 2) from error


def _find(options: argparse.Namespace) -> int:
    from paceline.cli.plan.measure import find
    from paceline.cli.train.command import num_workers_of

    project = _project(options)
    num_workers = num_workers_of(project)
    found = find(project, num_workers)
    if options.json:
        cli.print_json({"micro_batch": found.micro_batch, "step_s": found.step_s, "sample_s": found.sample_s})
        return 0
    global_batch = project.settings.trainer.global_batch
    print(found)
    print(
        f"\nmicro_batch={found.micro_batch} is the fastest on {cli.count(num_workers, 'worker')}: set "
        f"trainer.micro_batch={found.micro_batch}; global_batch={global_batch} stays"
    )
    return 0


def _situation(options: argparse.Namespace, own: Profile) -> Situation:
    others = [_added_profile(text) for text in options.add]
    check_combinable(own, others)
    known: dict[str, tuple[predict.Device, int]] = {}
    for profile in (own, *others):
        for device, count in zip(profile.devices, profile.counts, strict=True):
            if device.name in known:
                raise ValueError(f"two devices are named {device.name!r}: rename one with --name or --add NAME=FILE")
            known[device.name] = (device, count)
    link = _link(options.link, (own, *others))
    for name, factor in options.device:
        if name in known:
            raise ValueError(f"two devices are named {name!r}: choose another name for --device {name}={factor:g}")
        host = None if link is None else name
        known[name] = (own.devices[0].scaled(name, factor, host), 1)
    wanted = options.workers or {name: count for name, (_, count) in known.items()}
    for name in [*wanted, *options.price]:
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.3)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(
                f"unknown device {name!r}: the profiles have {', '.join(map(repr, known))}{hint}. Add a profile with "
                "--add NAME=FILE, or give its speed with --device NAME=FACTOR"
            )
    if (total := sum(wanted.values())) > _MAX_WORKERS:
        raise ValueError(f"{total} workers are too many: choose at most {_MAX_WORKERS}")
    kinds = []
    for name, count in wanted.items():
        device, per_host = known[name]
        kinds.append(Kind(device, count, options.price.get(name), None if link is None else per_host))
    hosts = {profile.host: profile.as_host for profile in (own, *others)}
    return Situation(_workload(own, options.global_batch), kinds, predict.Hardware(hosts, link))


def _link(bits_per_s: float | None, profiles: Sequence[Profile]) -> predict.Link | None:
    """The link of this nominal bandwidth; by default the slowest link of the profiles."""
    if bits_per_s is not None:
        return predict.Link.sold_as(bits_per_s)
    measured = [profile.link for profile in profiles if profile.link is not None]
    return min(measured, key=lambda link: link.bytes_per_s, default=None)


def _added_profile(text: str) -> Profile:
    """The profile in `[NAME=]FILE`."""
    if Path(text).is_file():  # whose name may have a "="
        return _read_profile(Path(text))
    name, _, path = text.rpartition("=")
    profile = _read_profile(Path(path))
    return profile.renamed(name) if name else profile


def _read_profile(path: Path) -> Profile:
    try:
        return Profile.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CommandError(
            f"there is no profile {path}: make one with `paceline plan CONFIG --out {path}`", 2
        ) from None
    except ValueError as error:
        raise CommandError(f"{path}: {error}", 2) from error


def _workload(own: Profile, wanted: int | None) -> predict.Workload:
    """wanted: replaces the profile's global batch. A profile of a run with a cadence has none."""
    subject = own.subject
    global_batch = wanted or own.global_batch or subject.micro_batch
    count = Steps(own.num_samples or global_batch, global_batch, subject.micro_batch).max_micro_batches
    is_gpu = not own.devices[0].cores
    return predict.Workload(
        count,
        subject.micro_batch,
        subject.gradient_bytes,
        own.num_samples,
        float(own.epochs or 1),
        "gradients" if own.global_batch or wanted else Cadence(),
        bucket_bytes=predict.GPU_BUCKET_BYTES if is_gpu else predict.BUCKET_BYTES,
    )


def _entry(each: Alternative) -> dict[str, Any]:
    predicted = each.prediction
    return {
        "workers": each.workers,
        "strategy": each.strategy,
        "samples_per_s": predicted.samples_per_s,
        "interval": [predicted.low, predicted.high],
        "efficiency": predicted.efficiency,
        "shares": predicted.shares,
        "step_s": predicted.step_s,
        "limit": predicted.limit,
        "lost_s": dict(predicted.parts),
        "epoch_s": each.epoch_s,
        "run_s": each.run_s,
        "epoch_cost": each.cost(each.epoch_s),
        "run_cost": each.cost(each.run_s),
    }


def _print(found: Sequence[Alternative]) -> None:
    rows = [_HEADER]
    for each in found:
        predicted = each.prediction
        rows.append(
            (
                each.workers,
                each.strategy,
                formats.rate(predicted.samples_per_s),
                f"{formats.rate(predicted.low)}..{formats.rate(predicted.high)}",
                f"{predicted.efficiency:.0%}",
                cli.or_dash(each.epoch_s, _duration),
                cli.or_dash(each.cost(each.epoch_s), _money),
                cli.or_dash(each.run_s, _duration),
                cli.or_dash(each.cost(each.run_s), _money),
                cli.shortened(":".join(map(str, predicted.shares)), 16),
                predicted.limit,
            )
        )
    cli.print_table(rows, right=range(2, 9), optional=(9, 3, 8, 7, 6))
    print(f"\n{advice(found)}")


def _duration(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else formats.duration(seconds)


def _money(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3g}"
