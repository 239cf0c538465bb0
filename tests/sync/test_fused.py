"""Whether the kernel that adds many gradients is used: never silently not."""

from __future__ import annotations

import logging
import sys

import pytest
import torch

from paceline.sync.fused import SWITCH, fused_addition

A_GPU = torch.device("cuda", 7)  # not one that any machine of ours has


def test_a_cpu_has_no_such_kernel(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "paceline"):
        assert fused_addition(torch.device("cpu")) is None
    assert not caplog.text


def test_the_switch_is_named_in_the_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(SWITCH, "0")
    with caplog.at_level(logging.INFO, "paceline"):
        assert fused_addition(A_GPU) is None
    assert "gradients are added one by one on cuda:7: PACELINE_FUSED=0" in caplog.text


def test_without_triton_the_log_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with caplog.at_level(logging.INFO, "paceline"):
        assert fused_addition(A_GPU) is None
    assert "gradients are added one by one on cuda:7: the kernel that adds many failed" in caplog.text
    assert "triton" in caplog.text
