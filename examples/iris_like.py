"""Flowers like Fisher's irises: not his 150 measurements, but draws with the same mean and spread per class.

Shared by `dp_train_iris.py` and `array_loader_loop.py`; not an example by itself.
"""

from __future__ import annotations

import numpy as np

CLASSES = ["setosa", "versicolor", "virginica"]
# Sepal length, sepal width, petal length, petal width, in centimetres.
MEANS_CM = [[5.01, 3.43, 1.46, 0.25], [5.94, 2.77, 4.26, 1.33], [6.59, 2.97, 5.55, 2.03]]
DEVIATIONS_CM = [[0.35, 0.38, 0.17, 0.11], [0.52, 0.31, 0.47, 0.20], [0.64, 0.32, 0.55, 0.27]]


def make_flowers(num_per_class: int = 50, seed: int = 42) -> tuple[np.ndarray, np.ndarray]:
    """Standardised measurements, float32 of shape (n, 4), and class numbers, int64 of shape (n,), in random order."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(len(CLASSES)), num_per_class))
    measured = rng.normal(np.array(MEANS_CM)[labels], np.array(DEVIATIONS_CM)[labels])
    standardised = (measured - measured.mean(axis=0)) / measured.std(axis=0)
    return standardised.astype(np.float32), labels.astype(np.int64)
