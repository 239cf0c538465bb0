"""How the workers of a world find each other, again for every communicator.

Every meeting gets a random name from rank 0, and everything that belongs to it is kept in the store under that name:
nothing that an earlier meeting left there, whether it succeeded or not, is ever mistaken for a part of this one.

    at/RANK = TOKEN                 a worker has come; the token is new each time
    go/TOKEN = NAME                 rank 0's answer to that very arrival
    NAME/offer/RANK = OFFER         what each worker tells the others

So it does not matter how often each worker met others before, and a worker whose attempt failed may simply try again.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from time import monotonic, sleep
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from paceline.core.errors import CommunicationError, CommunicationTimeout
from paceline.core.rank_variables import STORE_VARIABLE
from paceline.core.secret import ForgedError, Secret, run_secret
from paceline.core.world import World

# Workers may reach their first meeting far apart: importing, or building the data, takes one longer than another.
JOIN_TIMEOUT_S = 300.0
# How long torch's stores wait at a time, uninterruptible: between two waits signals are handled.
_SLICE_S = 0.5

# A store in a file looks for a key only every 10 ms. Workers that come at the same time need not wait so long.
_LOOKS_S = [0.0002 * 1.3**i for i in range(14)]  # 25 ms in all

_has_met = False


class Meeting(NamedTuple):
    """The workers are there. `offers` are theirs, by rank; `store` is for this meeting alone.

    To be kept as long as the store is used: torch does not keep alive what of `run_store` is written in Python.
    """

    store: Any
    offers: Sequence[Any]
    run_store: Any


def meet(world: World, timeout_s: float, offer: Any = None) -> Meeting:
    """Wait for all workers of the world, which call this together, and exchange offers, as JSON knows them.

    Waits `timeout_s`; the first time, at least JOIN_TIMEOUT_S.
    """
    global _has_met
    limit_s = timeout_s if _has_met or dist.is_initialized() else max(timeout_s, JOIN_TIMEOUT_S)
    try:
        attempt = _Attempt(world, _run_store(world, limit_s), limit_s)
        name = attempt.find_name()
        offers = attempt.exchange(name, offer)
    except ForgedError as error:
        raise CommunicationError(
            f"rank {world.rank} does not trust the store where the workers meet: {error}"
        ) from None
    except (RuntimeError, OSError) as error:
        if isinstance(error, CommunicationError):
            raise
        raise CommunicationError(f"rank {world.rank} cannot reach the store where the workers meet: {error}") from None
    _has_met = True
    return Meeting(dist.PrefixStore(name, attempt.store), offers, attempt.store)  # type: ignore[attr-defined]


class _Attempt:
    """One worker's attempt at a meeting."""

    def __init__(self, world: World, store: Any, limit_s: float) -> None:
        self.store = store
        self._world = world
        self._limit_s = limit_s
        self._deadline_s = monotonic() + limit_s
        self._answered: dict[int, bytes] = {}

    def find_name(self) -> str:
        """The meeting's name: from rank 0, once this worker's arrival is known there."""
        if self._world.is_main:
            name = secrets.token_hex(8)
            self._answer_arrivals(name)
            return name
        token = secrets.token_hex(8)
        here = _arrival(self._world.rank)
        self.store.set(here, token)
        try:
            self._wait({0: f"go/{token}"})
            return str(self.store.get(f"go/{token}").decode())
        finally:
            with suppress(RuntimeError):  # some stores cannot delete: an old token is no harm
                self.store.delete_key(here)

    def exchange(self, name: str, offer: Any) -> list[Any]:
        keys = {rank: f"{name}/offer/{rank}" for rank in range(self._world.size)}
        self.store.set(keys[self._world.rank], json.dumps(offer))
        # A worker whose arrival was answered may have given up before, and come again.
        self._wait(keys, (lambda: self._answer_arrivals(name)) if self._world.is_main else None)
        return [json.loads(self.store.get(key)) for key in keys.values()]

    def _answer_arrivals(self, name: str) -> None:
        arrivals = {rank: _arrival(rank) for rank in range(1, self._world.size)}
        self._wait({rank: key for rank, key in arrivals.items() if rank not in self._answered})
        for rank, key in arrivals.items():
            if self.store.check([key]) and (token := self.store.get(key)) != self._answered.get(rank):
                self.store.set(f"go/{token.decode()}", name)
                self._answered[rank] = token

    def _wait(self, keys: dict[int, str], meanwhile: Callable[[], None] | None = None) -> None:
        wait_for_keys(self.store, keys, self._world, self._limit_s, self._deadline_s, meanwhile)


def wait_for_keys(
    store: Any,
    keys: dict[int, str],
    world: World,
    limit_s: float,
    deadline_s: float | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> None:
    """Return when all keys, by the rank that writes them, are in the store; at the latest after `limit_s`."""
    deadline_s = monotonic() + limit_s if deadline_s is None else deadline_s
    for look_s in _LOOKS_S:
        if not keys or store.check(list(keys.values())):
            return
        sleep(look_s)
    while keys:
        left_s = deadline_s - monotonic()
        try:
            store.wait(list(keys.values()), timedelta(seconds=min(max(left_s, 0.001), _SLICE_S)))
            return
        except RuntimeError as error:
            if "imeout" not in str(error):
                raise
        if meanwhile is not None:
            meanwhile()
        missing = [rank for rank, key in keys.items() if not store.check([key])]
        if missing and monotonic() > deadline_s:
            raise CommunicationTimeout(
                f"rank {world.rank} waited {limit_s:g} s in joining the world of {world.size} workers: ranks {missing} "
                "did not come"
            )


class SealedStore(dist.Store):  # type: ignore[misc,name-defined]
    """A store that others can write to as well: of its values only those count that were signed with the secret."""

    def __init__(self, store: Any, secret: Secret) -> None:
        super().__init__()
        self._store = store
        self._secret = secret

    def set(self, key: str, value: str | bytes) -> None:
        content = value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(key, self._secret.sign(content, f"the value of {key}"))

    def get(self, key: str) -> bytes:
        return self._secret.check(self._store.get(key), f"the value of {key}")

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))  # a count cannot be signed

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys) if timeout is None else self._store.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete_key(key))

    def clone(self) -> SealedStore:
        return SealedStore(self._store.clone(), self._secret)

    @property
    def timeout(self) -> timedelta:
        return self._store.timeout  # type: ignore[no-any-return]

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)


def _arrival(rank: int) -> str:
    return f"at/{rank}"


def _run_store(world: World, limit_s: float) -> Any:
    """The store that all workers of this process's run reach."""
    store: Any
    if path := os.environ.get(STORE_VARIABLE):  # of our own launcher, for workers of one host
        store = dist.FileStore(path, -1)  # type: ignore[attr-defined]
    elif dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
    else:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ValueError(
                f"RANK and WORLD_SIZE are set but not {' and '.join(missing)}: start the script with torchrun, "
                "`paceline run` or paceline.launch, or unset RANK and WORLD_SIZE to train alone"
            )
        store = _store_of_variables(world.rank, world.size, limit_s)
    # Workers that were restarted may find the store of the workers before them.
    start = f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    secret = run_secret()
    if secret is None or path:  # the file is in a folder of this user's own
        return dist.PrefixStore(f"paceline/{start}", store)  # type: ignore[attr-defined]
    return SealedStore(dist.PrefixStore(f"{secret.name('store')}/{start}", store), secret)  # type: ignore[attr-defined]


@lru_cache(maxsize=1)  # rank 0 may be the one that keeps it: then it must live as long as the process
def _store_of_variables(rank: int, size: int, limit_s: float) -> Any:
    store, _, _ = next(rendezvous("env://", rank, size, timeout=timedelta(seconds=limit_s)))
    return store
