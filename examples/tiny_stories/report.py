"""What a run leaves behind: a summary to read and a plot of the loss."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SMOOTHED_STEPS = 20


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

    def summary(self) -> str:
        """A few lines for the terminal."""
        last = smooth(self.losses)[-1]
        samples_per_s = self.num_samples / self.training_s
        rows = {
            "workers": f"{self.num_workers} ({self.device})",
            "model": f"{self.num_parameters:,} parameters",
            "steps": f"{len(self.losses)} in {self.training_s:.0f} s, {samples_per_s:.0f} stories/s",
            "training loss": f"{self.losses[0]:.3f} -> {last:.3f} (mean of the last {SMOOTHED_STEPS} steps)",
            "evaluation loss": f"{self.evaluation_loss:.3f} on stories never trained on",
            "unigram entropy": f"{self.unigram_entropy:.3f} (all that word counts alone can reach)",
            "weights SHA-256": self.weights_sha256[:16],
        }
        return "\n".join(f"{name:<16} {value}" for name, value in rows.items())


def smooth(values: list[float]) -> list[float]:
    """Each value's mean with up to `SMOOTHED_STEPS - 1` values before it."""
    windows = (values[max(0, end - SMOOTHED_STEPS) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


def plot_loss(report: Report, path: Path) -> None:
    """Write the loss curve as an image. Lines are labelled where they are; there is no legend to look up."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = range(1, len(report.losses) + 1)
    smoothed = smooth(report.losses)
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(steps, report.losses, color="#9ecae1", linewidth=0.8)
    axes.plot(steps, smoothed, color="#08519c", linewidth=2)
    axes.axhline(report.unigram_entropy, color="#a63603", linewidth=1.2, linestyle="--")
    axes.plot(len(report.losses), report.evaluation_loss, "o", color="#238b45")

    def label(text: str, x: float, y: float, color: str, offset: tuple[int, int], align: str) -> None:
        axes.annotate(text, (x, y), xytext=offset, textcoords="offset points", color=color, ha=align, va="center")

    middle = len(steps) // 2
    label("unigram entropy", len(steps), report.unigram_entropy, "#a63603", (-4, 9), "right")
    label(f"training loss (line: mean of {SMOOTHED_STEPS} steps)", middle, smoothed[middle], "#08519c", (0, 26), "left")
    label(f"evaluation {report.evaluation_loss:.2f}", len(steps), report.evaluation_loss, "#238b45", (-8, -12), "right")
    axes.set(xlabel="step", ylabel="nats per word", xlim=(0, len(steps) * 1.01), ylim=(0, None))
    axes.set_title(f"Tiny stories, {report.num_workers} worker(s), {report.device}", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
