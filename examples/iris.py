"""Fisher's irises: 150 flowers of three species, four measurements of each, in centimetres (iris.csv).

Collected by E. Anderson, published by R. A. Fisher, "The use of multiple measurements in taxonomic problems", Annals of
Eugenics 7 (1936). The data is in the public domain; the numbers are those of scikit-learn's copy, which follows R's.

Shared by `dp_train_iris.py` and `array_loader_loop.py`; not an example by itself.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

CLASSES = ["setosa", "versicolor", "virginica"]


def load_iris(seed: int = 42) -> tuple[np.ndarray, np.ndarray]:
    """Standardised measurements, float32 of shape (150, 4), and class numbers, int64 of shape (150,), mixed."""
    with (Path(__file__).parent / "iris.csv").open(newline="") as file:
        _, *rows = csv.reader(file)
    measured = np.array([row[:4] for row in rows], np.float64)
    labels = np.array([CLASSES.index(row[4]) for row in rows], np.int64)
    standardised = (measured - measured.mean(axis=0)) / measured.std(axis=0)
    order = np.random.default_rng(seed).permutation(len(rows))
    return standardised[order].astype(np.float32), labels[order]
