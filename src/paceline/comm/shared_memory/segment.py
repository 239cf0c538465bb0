"""Memory that the workers of one host share, and the signals in it.

Every worker owns one segment: anonymous memory (memfd), which its peers map through /proc/PID/fd. The kernel frees it
with the last process that maps it, however that process ends. Layout:

    header      one page: the owner's progress and state
    records     a ring with descriptions of the owner's latest calls
    buffers     tensors, at the same offsets in every segment

Only the owner writes its header and records; every word has one writer and is aligned. On x86 all cores see the stores
of one core in order, so a peer that reads a word also sees the data stored before it. Processors with a weaker memory
order are not supported.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import secrets
import sys
import threading
from contextlib import suppress
from ctypes import c_int, c_long, c_uint, c_uint32, c_void_p
from enum import IntEnum
from functools import lru_cache
from pathlib import Path

import torch

PAGE_BYTES = mmap.PAGESIZE
NUM_RECORDS = 256
RECORD_BYTES = 128
_BUFFERS_OFFSET = PAGE_BYTES + NUM_RECORDS * RECORD_BYTES

# A pass over a large buffer takes 25% less time in pages of this size.
HUGE_PAGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25  # Linux 6.1: use huge pages regardless of the system's default
# The file begins with an unused huge page; see `_map`.
_MIN_FILE_BYTES = 2 * HUGE_PAGE_BYTES + _BUFFERS_OFFSET

# Indexes of the header's 8-byte words. The reason of a failure fills the page from _REASON_OFFSET on.
_TOKEN, _NUM_CALLS, _ACTIVE_CALL, _NUM_COMPLETED, _STATE, _SIGNAL, _NUM_RECEIVED = range(7)
_REASON_OFFSET = 512

_SYS_FUTEX = 202
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_ALL_WAITERS = 2**31 - 1
_SEM_BYTES = 32


def unsupported_reason() -> str | None:
    """Why this platform cannot share memory between workers; None if it can."""
    if not sys.platform.startswith("linux"):
        return f"shared memory requires Linux, not {sys.platform}"
    if platform.machine() != "x86_64":
        return f"shared memory relies on the memory order of x86_64, not {platform.machine()}"
    if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):  # as in some conda builds
        return "this Python was built without os.memfd_create or os.pidfd_open"
    return None


class State(IntEnum):
    """Whether a worker takes part in further exchanges."""

    OPEN = 0
    CLOSED = 1
    FAILED = 2
    TIMED_OUT = 3


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
        _futex_wake(_SYS_FUTEX, self._address, _FUTEX_WAKE, _ALL_WAITERS, None, None, 0)

    def sleep(self, value: int, timeout_s: float) -> None:
        """Return when the counter differs from `value`, or after `timeout_s`; may return early."""
        seconds = int(timeout_s)
        limit = _Timespec(seconds, int(1e9 * (timeout_s - seconds)))
        _futex_wait(_SYS_FUTEX, self._address, _FUTEX_WAIT, value, ctypes.addressof(limit), None, 0)


class Segment:
    """A worker's segment as its peers see it. Its size is the host's memory; only pages in use are allocated."""

    def __init__(self, fd: int) -> None:
        self._mapping, self._start = _map(fd)
        self._mapping.madvise(mmap.MADV_DONTDUMP)  # keeps core dumps small
        self._memory = memoryview(self._mapping)[self._start :]
        self._words = self._memory[:PAGE_BYTES].cast("Q")
        self._reason = self._memory[_REASON_OFFSET:PAGE_BYTES]
        self._records = self._memory[PAGE_BYTES:_BUFFERS_OFFSET]
        self.signal = Futex(self._memory, 8 * _SIGNAL)  # incremented after every other change of the header

    @classmethod
    def open_peer(cls, pid: int, fd: int, token: int) -> Segment:
        """Map the segment with this token that process `pid` has open as `fd`."""
        path = f"/proc/{pid}/fd/{fd}"
        # Root could open the files of any user, and the numbers come from a store that others may be able to write to.
        if (owner := Path(f"/proc/{pid}").stat().st_uid) != os.geteuid():
            raise OSError(f"process {pid} belongs to user {owner}, not to user {os.geteuid()}")
        file = os.open(path, os.O_RDWR)
        try:
            # In another PID namespace (container) this may be an unrelated file.
            if os.fstat(file).st_size < _MIN_FILE_BYTES or (segment := cls(file)).token != token:
                raise OSError(f"{path} is not the peer's segment: the workers are in different PID namespaces")
            return segment
        finally:
            os.close(file)

    @property
    def token(self) -> int:
        return self._words[_TOKEN]

    @property
    def num_calls(self) -> int:
        """How many exchanges the worker has started."""
        return self._words[_NUM_CALLS]

    @property
    def active_call(self) -> int | None:
        """The exchange whose blocks the worker is reducing now."""
        return self._words[_ACTIVE_CALL] - 1 if self._words[_ACTIVE_CALL] else None

    @property
    def num_completed(self) -> int:
        """How many exchanges with other hosts this worker has completed, as the leader of its host."""
        return self._words[_NUM_COMPLETED]

    @property
    def num_received(self) -> int:
        """This worker has received all deliveries of others with lower numbers."""
        return self._words[_NUM_RECEIVED]

    @property
    def state(self) -> int:
        return self._words[_STATE]

    @property
    def reason(self) -> str:
        """The error of a worker that failed, possibly truncated."""
        return bytes(self._reason).rstrip(b"\0").decode(errors="ignore")

    def record(self, number: int) -> bytes:
        """The description of call `number`. It is overwritten after NUM_RECORDS further calls."""
        start = number % NUM_RECORDS * RECORD_BYTES
        return bytes(self._records[start : start + RECORD_BYTES])

    def tensor(self, numel: int, dtype: torch.dtype, offset: int) -> torch.Tensor:
        """A flat tensor over the segment, which stays mapped as long as the tensor lives."""
        return torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=offset)

    def address(self, offset: int) -> int:
        """Valid as long as the segment lives."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory, offset))


class OwnSegment(Segment):
    """The segment of this process."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("paceline")
        try:
            os.ftruncate(self.fd, _MIN_FILE_BYTES + PAGE_BYTES * os.sysconf("SC_PHYS_PAGES"))
            super().__init__(self.fd)
            self._end = 0
            self.allocate(_BUFFERS_OFFSET)
        except BaseException:
            self.close()
            raise
        self._words[_TOKEN] = secrets.randbits(62)
        self._lock = threading.Lock()  # of the header's writes: a host's leader has two threads

    def allocate(self, nbytes: int, most: int = 0) -> int:
        """The offset of `nbytes` zeroed bytes that start on a new page, or on a new huge page if they fill one.

        most: the largest number of bytes that a peer allocates in the same call, if they differ.
        """
        most = max(nbytes, most)
        page = HUGE_PAGE_BYTES if most >= HUGE_PAGE_BYTES else PAGE_BYTES
        offset = -(-self._end // page) * page
        end = offset + -(-most // page) * page
        if end > len(self._memory):
            raise OSError(f"{nbytes:,} bytes exceed this host's memory")
        if used := -(-nbytes // page) * page:
            # Without this, running out of memory would be a fatal signal at the first access.
            os.posix_fallocate(self.fd, HUGE_PAGE_BYTES + offset, used)
            if page == HUGE_PAGE_BYTES:
                with suppress(OSError):  # an older kernel, or no huge page is free
                    self._mapping.madvise(_MADV_COLLAPSE, self._start + offset, used)
        self._end = end
        return offset

    def announce_call(self, call: str) -> int:
        """Tell the peers that a call is made; returns its number."""
        number = self._words[_NUM_CALLS]
        start = number % NUM_RECORDS * RECORD_BYTES
        self._records[start : start + RECORD_BYTES] = encode_record(call)
        with self._lock:
            self._words[_NUM_CALLS] = number + 1
            self.signal.increment()
        return number

    def begin_blocks(self, number: int) -> None:
        self._words[_ACTIVE_CALL] = number + 1

    def end_blocks(self) -> None:
        self._set(_ACTIVE_CALL, 0)

    def complete(self) -> None:
        self._set(_NUM_COMPLETED, self.num_completed + 1)

    def receive(self, delivery: int) -> None:
        self._set(_NUM_RECEIVED, delivery + 1)

    def end(self, state: State, reason: str = "") -> None:
        """Tell the peers that this worker takes part in no further exchange. Only the first call counts."""
        with self._lock:
            if self.state == State.OPEN:
                text = reason.encode()[: len(self._reason)]
                self._reason[: len(text)] = text
                self._words[_STATE] = state
                self.signal.increment()

    def _set(self, word: int, value: int) -> None:
        with self._lock:
            self._words[word] = value
            self.signal.increment()

    def close(self) -> None:
        """Close the file. The memory is released with its last user."""
        os.close(self.fd)


class BlockClaims:
    """Claims on the blocks of a buffer: the first worker that claims a block gets it.

    POSIX semaphores in shared memory serve as atomic flags. Claims are double-buffered: claiming a block in one turn
    releases it for the other, and all workers know a turn to be over before they claim in the next but one.
    """

    def __init__(self, segment: Segment, offset: int, num_blocks: int) -> None:
        first = segment.address(offset)
        self._semaphores = [
            [first + _SEM_BYTES * (turn * num_blocks + i) for i in range(num_blocks)] for turn in range(2)
        ]

    @staticmethod
    def nbytes(num_blocks: int) -> int:
        return 2 * num_blocks * _SEM_BYTES

    def initialize(self) -> None:
        """Called by one worker, before turn 0."""
        for turn, semaphores in enumerate(self._semaphores):
            for semaphore in semaphores:
                _sem_init(semaphore, 1, 1 - turn)

    def claim(self, turn: int, index: int) -> bool:
        if _sem_trywait(self._semaphores[turn][index]) != 0:
            return False
        _sem_post(self._semaphores[1 - turn][index])
        return True


@lru_cache(maxsize=1024)
def encode_record(call: str) -> bytes:
    return call.encode()[:RECORD_BYTES].ljust(RECORD_BYTES, b"\0")


def decode_record(record: bytes) -> str:
    return record.rstrip(b"\0").decode(errors="ignore")


def _map(fd: int) -> tuple[mmap.mmap, int]:
    """Map a segment's file. Returns the mapping and the offset in it at which the file's second huge page begins.

    Huge pages need the same alignment in the file and in the address space. mmap cannot choose the address, but it uses
    the same address again for a mapping of the same size: the second mapping adapts its file offset to that address.
    """
    nbytes = os.fstat(fd).st_size - HUGE_PAGE_BYTES
    with mmap.mmap(fd, nbytes) as trial:
        start = ctypes.addressof(ctypes.c_char.from_buffer(trial)) % HUGE_PAGE_BYTES
    return mmap.mmap(fd, nbytes, offset=start), HUGE_PAGE_BYTES - start


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", c_long), ("nanoseconds", c_long))


# Calls that return immediately keep the GIL, which is faster; the one that sleeps releases it.
_libc = ctypes.PyDLL(None)
_sem_trywait, _sem_post, _sem_init = _libc.sem_trywait, _libc.sem_post, _libc.sem_init
_sem_trywait.argtypes = _sem_post.argtypes = (c_void_p,)
_sem_init.argtypes = (c_void_p, c_int, c_uint)
_futex_wake, _futex_wait = _libc.syscall, ctypes.CDLL(None).syscall
_futex_wake.argtypes = _futex_wait.argtypes = (c_long, c_void_p, c_int, c_uint32, c_void_p, c_void_p, c_int)
