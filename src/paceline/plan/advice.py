"""Which of the available workers to use: predictions for the alternatives, and advice. Arithmetic only."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.plan.cadence import Cadence
from paceline.plan.predict import Averaging, Device, Hardware, Prediction, Workload, like, predict

# Smaller differences are within the error of predictions.
_NOTABLE = 0.05
_MAX_ALTERNATIVES = 16


@dataclass(frozen=True)
class Kind:
    """`count` workers on devices like this one. price_per_hour: of one device; None if unknown.

    per_host: devices per machine; the remaining ones are on further machines of its kind.
    """

    device: Device
    count: int
    price_per_hour: float | None = None
    per_host: int | None = None

    def devices(self, count: int) -> list[Device]:
        per_host = self.per_host or max(count, 1)
        return [
            self.device if number < per_host else replace(self.device, host=like(self.device.host, number // per_host))
            for number in range(count)
        ]


@dataclass(frozen=True)
class Alternative:
    """Some of the workers with one strategy. Costs are None if a price, or the number of samples, is unknown."""

    counts: Mapping[str, int]
    strategy: str
    prediction: Prediction
    price_per_hour: float | None
    epoch_s: float | None
    run_s: float | None

    @property
    def workers(self) -> str:
        """As `--workers` takes them: "2xA,1xB"."""
        return ",".join(f"{count}x{name}" for name, count in self.counts.items() if count)

    @property
    def samples_per_s(self) -> float:
        return self.prediction.samples_per_s

    def cost(self, seconds: float | None) -> float | None:
        return None if seconds is None or self.price_per_hour is None else self.price_per_hour * seconds / 3600


def strategy_name(strategy: str | Cadence | Averaging) -> str:
    if isinstance(strategy, Averaging):
        return f"averaging every {strategy.every}"
    return "cadence" if isinstance(strategy, Cadence) else strategy


def alternatives(workload: Workload, kinds: Sequence[Kind], hardware: Hardware) -> list[Alternative]:
    """Predictions for none, one or all of each kind; for all workers also with the other strategies. Fastest first."""
    if not any(kind.count for kind in kinds):
        raise ValueError("there is no worker to predict for: give --workers such as 2xA,1xB")
    choices = [sorted({0, min(1, kind.count), kind.count}) for kind in kinds]
    found = [_alternative(workload, kinds, counts, hardware) for counts in itertools.product(*choices) if any(counts)]
    found.sort(key=lambda each: -each.samples_per_s)
    everyone = [kind.count for kind in kinds]
    found = found[:_MAX_ALTERNATIVES]
    if sum(everyone) > 1:
        for strategy in (Cadence(), Averaging()):
            if type(strategy) is not type(workload.strategy):
                other = replace(workload, strategy=strategy)
                found.append(_alternative(other, kinds, everyone, hardware))
    return found


def _alternative(workload: Workload, kinds: Sequence[Kind], counts: Sequence[int], hardware: Hardware) -> Alternative:
    used = [(kind, count) for kind, count in zip(kinds, counts, strict=True) if count]
    prediction = predict(workload, [device for kind, count in used for device in kind.devices(count)], hardware)
    prices = [kind.price_per_hour * count for kind, count in used if kind.price_per_hour is not None]
    epoch_s = prediction.epoch_s(workload)
    return Alternative(
        {kind.device.name: count for kind, count in zip(kinds, counts, strict=True)},
        strategy_name(workload.strategy),
        prediction,
        sum(prices) if len(prices) == len(used) else None,
        epoch_s,
        None if epoch_s is None else epoch_s * workload.epochs,
    )


def advice(found: Sequence[Alternative]) -> str:
    """What to do, in a sentence or a few."""
    usual = [each for each in found if each.strategy == found[0].strategy]
    best = usual[0]
    # The fewest workers that are about as fast.
    chosen = min(
        (each for each in usual if each.samples_per_s >= (1 - _NOTABLE / 2) * best.samples_per_s),
        key=lambda each: (sum(each.counts.values()), -each.samples_per_s),
    )
    shown = chosen.prediction
    text = (
        f"Use {chosen.workers} with {chosen.strategy}: {_number(shown.samples_per_s)} samples/s ({_number(shown.low)} "
        f"to {_number(shown.high)}), {shown.efficiency:.0%} of the sum of the devices alone"
    )
    text += "." if shown.limit == "compute" else f"; the rest is lost to {shown.limit}."
    return " ".join([text, *_about_kinds(usual, chosen), *_about_strategies(found, usual)])


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _about_kinds(usual: Sequence[Alternative], chosen: Alternative) -> list[str]:
    """What each kind adds to, or would take from, the chosen workers."""
    by_counts = {tuple(each.counts.values()): each for each in usual}
    sentences = []
    for number, (name, count) in enumerate(chosen.counts.items()):
        counts = list(chosen.counts.values())
        most = max(each.counts[name] for each in usual)
        counts[number] = 0 if count else most
        other = by_counts.get(tuple(counts))
        if other is None:
            continue
        with_it, without = (chosen, other) if count else (other, chosen)
        gain = with_it.samples_per_s / without.samples_per_s - 1
        costs = with_it.cost(with_it.epoch_s), without.cost(without.epoch_s)
        price = f", and {costs[0] / costs[1] - 1:+.0%} to the cost of an epoch" if costs[0] and costs[1] else ""
        if count:
            sentences.append(f"{name} adds {gain:.0%} to the speed{price}.")
        else:
            sentences.append(f"{name} is not worth plugging in: it changes the speed by {gain:+.0%}.")
    return sentences


def _about_strategies(found: Sequence[Alternative], usual: Sequence[Alternative]) -> list[str]:
    others = [each for each in found if each not in usual]
    if not others:
        return []
    best = max(others, key=lambda each: each.samples_per_s)
    ratio = best.samples_per_s / usual[0].samples_per_s
    if ratio < 1 + _NOTABLE:
        return []
    faster = f"{ratio - 1:.0%} faster" if ratio < 2 else f"{ratio:,.1f} times as fast"
    return [f"With {best.strategy} {best.workers} would be {faster}, but the result depends on the workers."]
