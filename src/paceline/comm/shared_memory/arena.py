"""Memory that the workers of one host share, and how they signal through it.

Every worker has an `Arena`: memory without a name, which its peers open through the kernel's table of its files. It
is gone when the last process that maps it is, however that one ends. Its first page is the worker's `Board`, where it
tells the others how far it is; tensors follow.

Every word of a board has one writer and is aligned. On x86 all cores see one core's stores in the order it made them,
so whoever reads a word also sees the data stored before it; other processors promise less and are refused.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import secrets
import select
import sys
from collections.abc import Mapping
from contextlib import suppress
from ctypes import c_int, c_long, c_uint, c_uint32, c_void_p
from enum import IntEnum
from itertools import product
from pathlib import Path

import torch

PAGE = mmap.PAGESIZE
MAX_BUFFERS = 4096
RECORD_BYTES = 128
_KEY_BYTES = 8

FIRST_BYTES = PAGE + 2 * MAX_BUFFERS * RECORD_BYTES

# A pass over large memory takes a quarter less time in pages of this size than in ordinary ones.
HUGE_PAGE = 2 << 20
_MADV_COLLAPSE = 25  # Linux 6.1: replace what is there by huge pages, whatever the host's default
# An arena's file begins with a huge page that nobody uses; see `_map`.
_MIN_BYTES = 2 * HUGE_PAGE + FIRST_BYTES

# The words of a board, 8 bytes each, after the arena's token.
_CALLS, _INSIDE, _STATE, _NUM_BUFFERS, _BELL = range(1, 6)
_REASON_OFFSET = 512  # the rest of the page is for the reason of a failure

_FUTEX_SYSCALL = 202
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_EVERYBODY = 2**31 - 1
_SEM_BYTES = 32


def missing_arena() -> str | None:
    """Why this host's processes cannot share memory in our way; None if they can."""
    if not sys.platform.startswith("linux"):
        return f"it takes Linux, and this is {sys.platform}"
    if platform.machine() != "x86_64":
        return f"it relies on the memory order of x86_64, and this is {platform.machine()}"
    if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        return "this Python was built without memfd_create or pidfd_open"
    return None


class State(IntEnum):
    """Whether more is to come from a worker."""

    OPEN = 0
    CLOSED = 1
    FAILED = 2
    TIMED_OUT = 3  # failed, since others did not come


class Arena:
    """One worker's memory, mapped by all. As large as the host's memory, of which only what is used exists."""

    def __init__(self, fd: int) -> None:
        self._mapping, self._first = _map(fd)
        # A core dump would contain all of it, zeros included.
        self._mapping.madvise(mmap.MADV_DONTDUMP)
        self._memory = memoryview(self._mapping)[self._first :]
        self.board = Board(self._memory)

    @classmethod
    def of_peer(cls, pid: int, fd: int, token: int) -> Arena:
        """The arena that process `pid` has as its file `fd`, and which carries this token."""
        path = f"/proc/{pid}/fd/{fd}"
        # Root could open anybody's, and the number came from a store that others may be able to write to.
        if (owner := Path(f"/proc/{pid}").stat().st_uid) != os.geteuid():
            raise OSError(f"process {pid} belongs to user {owner}, not to this one")
        file = os.open(path, os.O_RDWR)
        try:
            # Where processes are numbered differently (another container), this may be somebody else's file.
            if os.fstat(file).st_size < _MIN_BYTES or (arena := cls(file)).token != token:
                raise OSError(f"{path} is not the peer's memory: the workers do not see the same processes")
            return arena
        finally:
            os.close(file)

    @property
    def token(self) -> int:
        return int.from_bytes(self._memory[:8], "little")

    def tensor(self, numel: int, dtype: torch.dtype, offset: int) -> torch.Tensor:
        """A flat tensor over the memory, which lives as long as any such tensor."""
        return torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=offset)

    def count(self, offset: int) -> Count:
        """A number that others can wait for, over `Count.NUM_BYTES` of the memory."""
        return Count(self._memory, offset)

    def address(self, offset: int) -> int:
        """Valid as long as the arena lives."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory, offset))


class OwnArena(Arena):
    """The arena of this process, where room can be made."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("paceline")
        try:
            os.ftruncate(self.fd, _MIN_BYTES + PAGE * os.sysconf("SC_PHYS_PAGES"))
            super().__init__(self.fd)
            self._end = 0
            self.reserve(FIRST_BYTES)
        except BaseException:
            self.close()
            raise
        self._memory[:8] = secrets.token_bytes(7) + b"\0"  # positive as a signed integer too

    def reserve(self, nbytes: int) -> int:
        """The offset of so many new bytes, zero, on pages of their own; on huge ones if they are many."""
        page = HUGE_PAGE if nbytes >= HUGE_PAGE else PAGE
        offset = -(-self._end // page) * page
        end = offset + -(-nbytes // page) * page
        if end > len(self._memory):
            raise OSError(f"{nbytes:,} bytes are more than this host has")
        # Now a lack of memory is an error that can be reported; at the first touch it would be a fatal signal.
        os.posix_fallocate(self.fd, HUGE_PAGE + offset, end - offset)
        if page == HUGE_PAGE:
            with suppress(OSError):  # an older kernel, or no such page to be had: ordinary ones do
                self._mapping.madvise(_MADV_COLLAPSE, self._first + offset, end - offset)
        self._end = end
        return offset

    def close(self) -> None:
        """Let go of the file. The memory itself goes with its last user."""
        os.close(self.fd)


class Count:
    """A number in shared memory that one thread raises, and others sleep for."""

    NUM_BYTES = 64

    def __init__(self, memory: memoryview, offset: int) -> None:
        self._word = c_uint32.from_buffer(memory, offset)
        self._address = ctypes.addressof(self._word)

    @property
    def value(self) -> int:
        return self._word.value

    def add_one(self) -> None:
        """Wakes whoever sleeps. Always: to know whether somebody does would take a fence that Python lacks."""
        self._word.value += 1
        _futex_wake(_FUTEX_SYSCALL, self._address, _FUTEX_WAKE, _EVERYBODY, None, None, 0)

    def sleep(self, value: int, seconds: float) -> None:
        """Until the number is not `value` any more, at most so long."""
        whole = int(seconds)
        limit = _Timespec(whole, int(1e9 * (seconds - whole)))
        _futex_wait(_FUTEX_SYSCALL, self._address, _FUTEX_WAIT, value, ctypes.addressof(limit), None, 0)


class Board:
    """What one worker tells the others: how many calls it has made, which one it is working on, whether it left.

    A *record* describes a call on a buffer; each buffer has two, used in turn. A reader who does not find what it
    waits for reads the bell, looks again and, if it still is not there, sleeps until the bell rings.
    """

    def __init__(self, memory: memoryview) -> None:
        self._words = memory[:PAGE].cast("Q")
        self._reason = memory[_REASON_OFFSET:PAGE]
        self._records = memory[PAGE:FIRST_BYTES]
        self.bell = Count(memory, 8 * _BELL)

    @property
    def calls(self) -> int:
        """How many exchanges the worker has started."""
        return self._words[_CALLS]

    @property
    def inside(self) -> int | None:
        """The exchange the worker is reducing blocks of at the moment."""
        return self._words[_INSIDE] - 1 if self._words[_INSIDE] else None

    @property
    def state(self) -> int:
        return self._words[_STATE]

    def announce_call(self, place: tuple[int, int] | None = None, text: bytes = b"") -> int:
        """One more call is made, on a buffer in one of its turns, or outside shared memory; the call's number.

        `text`: what `record_text` made of the call's description.
        """
        number = self.calls
        if place is not None:
            self._records[_slot(place)] = _call_key(number) + text
        self._words[_CALLS] = number + 1
        self.bell.add_one()
        return number

    def enter(self, number: int) -> None:
        self._words[_INSIDE] = number + 1

    def leave(self) -> None:
        self._words[_INSIDE] = 0
        self.bell.add_one()

    @property
    def reason(self) -> str:
        """Why the worker failed, as far as it told."""
        return bytes(self._reason).rstrip(b"\0").decode(errors="ignore")

    def end(self, state: State, reason: str = "") -> None:
        """Once: who closes after an error has still failed."""
        if self.state == State.OPEN:
            text = reason.encode()[: len(self._reason)]
            self._reason[: len(text)] = text
            self._words[_STATE] = state
            self.bell.add_one()

    def add_buffer(self) -> int:
        number = self._words[_NUM_BUFFERS]
        if number == MAX_BUFFERS:
            raise OSError(f"there are {MAX_BUFFERS} shared buffers already, as many as can be")
        self._words[_NUM_BUFFERS] = number + 1
        return number

    def record(self, place: tuple[int, int]) -> bytes:
        """Number and text of the last call on a buffer in this turn."""
        return bytes(self._records[_slot(place)])

    def find_call(self, number: int) -> str | None:
        """The text of this call, if it is among the last ones on its buffer."""
        for place in product(range(self._words[_NUM_BUFFERS]), range(2)):
            if (record := self.record(place)).startswith(key := _call_key(number)):
                return record[len(key) :].rstrip(b"\0").decode()
        return None


class Claims:
    """Pieces of work that whoever asks first gets, in two turns: one taken in a turn is to be had in the other again.

    Semaphores in shared memory. A worker asks in a turn only when all know the one before to be over.
    """

    def __init__(self, arena: Arena, offset: int, count: int) -> None:
        first = arena.address(offset)
        self._semaphores = [[first + _SEM_BYTES * (turn * count + i) for i in range(count)] for turn in range(2)]

    @staticmethod
    def num_bytes(count: int) -> int:
        return 2 * count * _SEM_BYTES

    def prepare(self) -> None:
        """Before turn 0, which is the first, by one worker."""
        for turn, semaphores in enumerate(self._semaphores):
            for semaphore in semaphores:
                _sem_init(semaphore, 1, 1 - turn)

    def take(self, turn: int, index: int) -> bool:
        if _sem_trywait(self._semaphores[turn][index]) != 0:
            return False
        _sem_post(self._semaphores[1 - turn][index])
        return True


class Processes:
    """Notices the end of processes, whatever children they leave behind."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        """`pids`: by rank."""
        self._ranks: dict[int, int] = {}
        self._poll = select.poll()
        try:
            for rank, pid in pids.items():
                fd = os.pidfd_open(pid)
                self._ranks[fd] = rank
                self._poll.register(fd, select.POLLIN)
        except BaseException:
            self.close()
            raise

    def ended(self) -> set[int]:
        """The ranks of those that have ended."""
        return {self._ranks[fd] for fd, _ in self._poll.poll(0)}

    def close(self) -> None:
        for fd in self._ranks:
            os.close(fd)


def _map(fd: int) -> tuple[mmap.mmap, int]:
    """The memory of an arena's file from some place in its first huge page on, and where in it the second begins.

    Huge pages must begin at multiples of their size in the file and in the address space alike. Who maps memory cannot
    choose the address, so the place in the file follows it: memory of the same size is put where it was a moment ago.
    """
    nbytes = os.fstat(fd).st_size - HUGE_PAGE
    with mmap.mmap(fd, nbytes) as tried:
        start = ctypes.addressof(ctypes.c_char.from_buffer(tried)) % HUGE_PAGE
    return mmap.mmap(fd, nbytes, offset=start), HUGE_PAGE - start


def record_text(call: str) -> bytes:
    """The description of a call as it stands in a record."""
    return call.encode()[: RECORD_BYTES - _KEY_BYTES].ljust(RECORD_BYTES - _KEY_BYTES, b"\0")


def _call_key(number: int) -> bytes:
    # Plus one: an empty record is of no call.
    return (number + 1).to_bytes(_KEY_BYTES, "little")


def _slot(place: tuple[int, int]) -> slice:
    buffer, turn = place
    first = (2 * buffer + turn) * RECORD_BYTES
    return slice(first, first + RECORD_BYTES)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", c_long), ("nanoseconds", c_long))


_FUTEX_ARGUMENTS = (c_long, c_void_p, c_int, c_uint32, c_void_p, c_void_p, c_int)
# What returns at once keeps the interpreter's lock, which is faster; what sleeps gives it away.
_libc = ctypes.PyDLL(None)
_sem_trywait, _sem_post = _libc.sem_trywait, _libc.sem_post
_sem_init = _libc.sem_init
_sem_init.argtypes = (c_void_p, c_int, c_uint)
_sem_trywait.argtypes = _sem_post.argtypes = (c_void_p,)
_futex_wake, _futex_wait = _libc.syscall, ctypes.CDLL(None).syscall
_futex_wake.argtypes = _futex_wait.argtypes = _FUTEX_ARGUMENTS
