"""GPUs that cannot run a kernel: this build of torch may have none for them, or they are broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from paceline.core.processes import is_worker

# What a launcher found out, for its workers.
LEFT_OUT_VARIABLE = "PACELINE_LEFT_OUT"
_GPUS = Path("/proc/driver/nvidia/gpus")
_PROBE_TIMEOUT_S = 120.0
# Both probes run in a separate process: trying a GPU takes half a gigabyte of its memory until the process ends.
# GPUs of several models: one of them may be too old or too new for this build of torch.
_TORCH_PROBE = """
import json, torch
found = {}
for index in range(torch.cuda.device_count()):
    try:
        torch.ones(1, device=f"cuda:{index}").add_(1).item()
    except RuntimeError as error:
        found[index] = f"{torch.cuda.get_device_name(index)}: {str(error).splitlines()[0]}"
print(json.dumps(found))
"""
# GPUs of one model: only a broken one differs, and the driver finds it without the seconds that importing torch takes.
_DRIVER_PROBE = """
import ctypes, json
driver = ctypes.CDLL("libcuda.so.1")

def call(name, *arguments):
    code = getattr(driver, name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"CUDA error: {(text.value or str(code).encode()).decode()}")

def try_gpu(index):
    device, context, memory, number = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_uint32()
    call("cuDeviceGet", ctypes.byref(device), index)
    call("cuCtxCreate_v2", ctypes.byref(context), 0, device)
    call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(4))
    call("cuMemsetD32_v2", memory, 7, ctypes.c_size_t(1))
    call("cuMemcpyDtoH_v2", ctypes.byref(number), memory, ctypes.c_size_t(4))
    if number.value != 7:
        raise RuntimeError("its memory does not keep what is written to it")

def name_of(index):
    text = ctypes.create_string_buffer(256)
    return text.value.decode() if driver.cuDeviceGetName(text, 256, index) == 0 and text.value else "GPU"

call("cuInit", 0)
count, found = ctypes.c_int(), {}
call("cuDeviceGetCount", ctypes.byref(count))
for index in range(count.value):
    try:
        try_gpu(index)
    except RuntimeError as error:
        found[index] = f"{name_of(index)}: {error}"
print(json.dumps(found))
"""

_found: dict[int, str] | None = None  # by a probe in this process


def left_out() -> dict[int, str]:
    """The GPUs known not to run a kernel, by number: name and reason.

    GPUs of different models are tried here; GPUs of one model only when workers are launched, see `try_gpus`.
    """
    return _known(try_alike=False)


def try_gpus() -> dict[int, str]:
    """As `left_out`, after trying all GPUs of this machine, once per process. Imports no torch into this process.

    With one GPU there is nothing to choose, nor in a worker of another launcher: the run's set-up reports the error.
    """
    return _known(try_alike=True)


def note_broken(index: int, reason: str) -> None:
    """Leave out a GPU that this process has tried."""
    global _found
    _found = {**left_out(), index: reason}


def _known(*, try_alike: bool) -> dict[int, str]:
    global _found
    if (told := os.environ.get(LEFT_OUT_VARIABLE)) is not None:
        return {int(index): reason for index, reason in json.loads(told).items()}
    if _found is None and _num_visible() != 1:
        models = _models()
        if len(set(models)) > 1:
            _found = _probe(_TORCH_PROBE)
        elif len(models) > 1 and try_alike and not is_worker():
            _found = _probe(_DRIVER_PROBE)
    return _found or {}


def _probe(program: str) -> dict[int, str]:
    command = [sys.executable, "-c", program]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=True)
        return {int(index): reason for index, reason in json.loads(done.stdout.splitlines()[-1]).items()}
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return {}  # best effort: the run's set-up tries each GPU again


def _models() -> list[str]:
    """The model of each of the machine's GPUs."""
    texts = [path.read_text(errors="replace") for path in _GPUS.glob("*/information")]
    lines = (line for text in texts for line in text.splitlines())
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]


def _num_visible() -> int | None:
    """How many GPUs CUDA_VISIBLE_DEVICES names, at least 1; None if it is not set."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if text is None else len(text.split(","))
