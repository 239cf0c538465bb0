"""The environment of a run: what is needed to repeat it, or to explain why another run differs."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("paceline", "torch", "numpy", "datasets", "pyarrow", "safetensors", "transformers")
_GIT_TIMEOUT_S = 5.0


def describe_environment(folder: Path | None = None) -> dict[str, Any]:
    """Versions, host, devices, command line, and the git commit of `folder` (default: the current one).

    Environment variables are not included: they often contain secrets.
    """
    return {
        "versions": _versions(),
        "host": {
            "name": platform.node(),
            "system": platform.platform(),
            "processor": processor_name(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
        "devices": _devices(),
        "git": _git(folder or Path.cwd()),
        "command": list(sys.orig_argv),
        "folder": str(Path.cwd()),
    }


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def processor_name() -> str:
    """The model name from the kernel, which `platform` does not provide on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _devices() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return [{"name": "cpu"}]
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [{"name": properties.name, "memory_bytes": properties.total_memory} for properties in found]


def _git(folder: Path) -> dict[str, Any] | None:
    """None outside of a repository, and if git is not installed or does not answer."""
    options = ("status", "--porcelain=v2", "--branch", "--untracked-files=no")
    command = ["git", "--no-optional-locks", "-C", str(folder), *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_GIT_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    lines = done.stdout.splitlines()
    facts = dict(line.split(" ", 2)[1:] for line in lines if line.startswith("# "))
    has_changes = any(not line.startswith("# ") for line in lines)
    return {"commit": facts["branch.oid"], "branch": facts["branch.head"], "has_changes": has_changes}
