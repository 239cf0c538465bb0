"""Process-wide settings of exact mode: what they are while a run is open, and that they end with it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from paceline.core.world import World
from paceline.run.determinism import process_settings


def settings() -> dict[str, Any]:
    import torch._inductor.config

    return {
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_attention": torch.backends.cuda.cudnn_sdp_enabled(),
        # Compiled kernels: chosen by rules, not by timing them, and with aligned matrix products all the same.
        "compiler_deterministic": torch._inductor.config.deterministic,
        "compiler_pads": torch._inductor.config.force_shape_pad,
    }


def test_exact_mode_sets_deterministic_kernels_and_restores_what_was_there() -> None:
    before = settings()
    with process_settings(World(), exact=True, threads=None):
        assert settings() == {
            "threads": 1,
            "deterministic": True,
            "warn_only": False,
            "fill": False,
            "cudnn_benchmark": False,
            "cudnn_attention": False,
            "compiler_deterministic": True,
            "compiler_pads": True,
        }
    assert settings() == before


def test_runs_may_end_in_any_order() -> None:
    before = settings()
    first = process_settings(World(), exact=True, threads=None)
    second = process_settings(World(), exact=True, threads=2)
    third = process_settings(World(), exact=False, threads=3)
    first.close()
    assert settings()["deterministic"]
    assert settings()["threads"] == 3
    third.close()
    assert settings()["deterministic"]
    assert settings()["threads"] == 2
    second.close()
    assert settings() == before


def test_plain_mode_leaves_the_kernels_alone() -> None:
    before = settings()
    with process_settings(World(), exact=False, threads=1):
        assert settings() == {**before, "threads": 1}
    assert settings() == before


@pytest.mark.parametrize("is_set", [False, True])
def test_a_variable_that_slows_every_matrix_product_down_is_reported(
    is_set: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    if is_set:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    else:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with caplog.at_level(logging.WARNING, "paceline"), process_settings(World(), exact=True, threads=1):
        pass
    assert ("CUBLAS_WORKSPACE_CONFIG is set" in caplog.text) == is_set
