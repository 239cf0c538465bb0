"""What a run leaves behind: a summary to read and a plot of the loss."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SMOOTHED_STEPS = 20
BLUE, PALE_BLUE, RED, GREEN = "#08519c", "#9ecae1", "#a63603", "#238b45"


@dataclass(frozen=True)
class Report:
    """The outcome of a run. Losses are in nats per word."""

    num_workers: int
    device: str
    num_parameters: int
    num_samples: int
    training_s: float
    losses: list[float]
    evaluation_loss: float
    unigram_entropy: float
    story: str
    weights_sha256: str
    where_time_went: str

    def summary(self) -> str:
        """A few lines for the terminal."""
        ending = self.losses[-SMOOTHED_STEPS:]
        last = sum(ending) / len(ending)
        samples_per_s = self.num_samples / self.training_s
        rows = {
            "workers": f"{self.num_workers} ({self.device})",
            "model": f"{self.num_parameters:,} parameters",
            "steps": f"{len(self.losses)} in {self.training_s:.0f} s, {samples_per_s:.0f} stories/s",
            "training loss": f"{self.losses[0]:.3f} -> {last:.3f} (mean of the last {len(ending)} steps)",
            "evaluation loss": f"{self.evaluation_loss:.3f} on stories never trained on",
            "unigram entropy": f"{self.unigram_entropy:.3f} (all that word counts alone can reach)",
            "weights SHA-256": self.weights_sha256[:16],
        }
        return "\n".join(f"{name:<16} {value}" for name, value in rows.items())


def smooth(values: list[float]) -> list[float]:
    """Each value's mean with equally many neighbours on either side: half of `SMOOTHED_STEPS`, fewer at the ends."""
    smoothed = []
    for i in range(len(values)):
        reach = min(SMOOTHED_STEPS // 2, i, len(values) - 1 - i)
        smoothed.append(sum(values[i - reach : i + reach + 1]) / (2 * reach + 1))
    return smoothed


def plot_loss(report: Report, path: Path) -> None:
    """Write the loss curve as an image. Lines are labelled where they are; there is no legend to look up."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = range(1, len(report.losses) + 1)
    smoothed = smooth(report.losses)
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.set_yscale("log")  # the first fall is steep, the rest is shallow: both should be seen
    axes.plot(steps, report.losses, color=PALE_BLUE, linewidth=0.8)
    axes.plot(steps, smoothed, color=BLUE, linewidth=1.8)
    axes.axhline(report.unigram_entropy, color=RED, linewidth=1.2, linestyle="--")
    axes.plot(len(steps), report.evaluation_loss, "o", color=GREEN, clip_on=False)

    def label(text: str, x: float, y: float, color: str, offset: tuple[int, int], align: str) -> None:
        axes.annotate(text, (x, y), xytext=offset, textcoords="offset points", color=color, ha=align, va="center")

    third = len(steps) // 3
    label(f"unigram entropy {report.unigram_entropy:.2f}", len(steps), report.unigram_entropy, RED, (-4, -9), "right")
    label("training loss, and its smoothed line", third, max(report.losses[third:]), BLUE, (0, 12), "left")
    label(f"evaluation loss {report.evaluation_loss:.2f}", len(steps), report.evaluation_loss, GREEN, (-4, 24), "right")
    ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10) if tick <= 1.2 * max(report.losses)]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set(
        xlabel="step",
        ylabel="nats per word",
        xlim=(0, len(steps)),
        ylim=(0.8 * min(*report.losses, report.evaluation_loss), None),
    )
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.6)
    workers = f"{report.num_workers} worker{'s' if report.num_workers > 1 else ''}"
    axes.set_title(f"Tiny stories, {workers}, {report.device}", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
