"""A counter in shared memory on which processes sleep without using a core. Linux only; imports no torch."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_long, c_uint32, c_void_p

_SYS_FUTEX = 202
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_ALL_WAITERS = 2**31 - 1


class Futex:
    """A 32-bit counter in shared memory on which other threads and processes can sleep."""

    def __init__(self, memory: memoryview, offset: int) -> None:
        self._word = c_uint32.from_buffer(memory, offset)
        self._address = ctypes.addressof(self._word)

    @property
    def value(self) -> int:
        return self._word.value

    def increment(self) -> None:
        """Always wakes the sleepers: knowing whether there are any would take a memory fence, which Python lacks."""
        self._word.value += 1
        self.wake()

    def wake(self) -> None:
        """Let all sleepers return early."""
        _futex_wake(_SYS_FUTEX, self._address, _FUTEX_WAKE, _ALL_WAITERS, None, None, 0)

    def sleep(self, value: int, timeout_s: float) -> None:
        """Return when the counter differs from `value`, or after `timeout_s`; may return early."""
        seconds = int(timeout_s)
        limit = _Timespec(seconds, int(1e9 * (timeout_s - seconds)))
        _futex_wait(_SYS_FUTEX, self._address, _FUTEX_WAIT, value, ctypes.addressof(limit), None, 0)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", c_long), ("nanoseconds", c_long))


# The call that returns immediately keeps the GIL, which is faster; the one that sleeps releases it.
_futex_wake, _futex_wait = ctypes.PyDLL(None).syscall, ctypes.CDLL(None).syscall
_futex_wake.argtypes = _futex_wait.argtypes = (c_long, c_void_p, c_int, c_uint32, c_void_p, c_void_p, c_int)
