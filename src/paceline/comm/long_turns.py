"""Long turns for workers that share cores.

Linux lets the threads of a core alternate every few milliseconds, and one that was just woken often goes first: good
for programs that somebody waits for. Workers wait for the last of them, whoever that is, and each turn begins with a
cache full of the other's data: with two workers per core that is 6% of their processor time. So they ask for turns
as long as the kernel allows, and not to interrupt each other. All other threads go before them as always.

PACELINE_LONG_TURNS=0 leaves the turns to the system.
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
from contextlib import suppress
from ctypes import c_long, c_void_p
from threading import get_ident, get_native_id
from weakref import WeakValueDictionary

logger = logging.getLogger("paceline")

SWITCH = "PACELINE_LONG_TURNS"
TURN_NS = 100_000_000  # the longest there is; kernels before 6.12 have their own

_SET, _GET = 314, 315  # the system calls sched_setattr and sched_getattr on x86_64
# struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period. For ordinary threads the runtime
# is the length of a turn.
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
_THIS_THREAD = 0


class LongTurns:
    """Those of the thread that makes it, until `close`. Where they cannot be had, the log says why.

    Processes that the thread forks have ordinary turns: a reader should go first when its file has come. Threads and
    programs that it starts take after it, so whatever helps a worker should be started before.
    """

    def __init__(self) -> None:
        self._thread = get_native_id()
        try:
            self._before: bytes | None = _take()
        except OSError as error:
            logger.info("workers that share cores take turns as the system likes: %s", error)
            self._before = None
        else:
            _of_threads[get_ident()] = self

    def close(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            with suppress(ProcessLookupError):  # the thread has ended
                _set(self._thread, before)

    def end_in_child(self) -> None:
        """In a process that the thread has forked, whose only thread is its copy."""
        self._thread = get_native_id()
        self.close()


_of_threads: WeakValueDictionary[int, LongTurns] = WeakValueDictionary()


def _take() -> bytes:
    if os.environ.get(SWITCH) == "0":
        raise OSError(f"{SWITCH}=0")
    found = _get(_THIS_THREAD)
    size, policy, flags, nice, *_ = _ATTRIBUTES.unpack(found)
    if policy != os.SCHED_OTHER:
        raise OSError(f"this thread has scheduling policy {policy} already")
    _set(_THIS_THREAD, _ATTRIBUTES.pack(size, os.SCHED_BATCH, flags, nice, 0, TURN_NS, 0, 0))
    return found


def _end_in_child() -> None:
    turns = _of_threads.get(get_ident())
    if turns is not None:
        turns.end_in_child()


def _get(thread: int) -> bytes:
    found = ctypes.create_string_buffer(_ATTRIBUTES.size)
    _check(_syscall(_GET, thread, found, len(found), 0))
    return found.raw


def _set(thread: int, attributes: bytes) -> None:
    _check(_syscall(_SET, thread, attributes, 0, 0))


def _check(result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.argtypes = (c_long, c_long, c_void_p, c_long, c_long)
os.register_at_fork(after_in_child=_end_in_child)
