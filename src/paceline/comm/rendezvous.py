"""How the workers of a world find each other: through a key-value store, once for every communicator.

Every rendezvous has a random name, chosen by rank 0, and keeps its keys under that name. So leftovers of an earlier
rendezvous are never read, workers need not have made the same number of attempts, and a failed attempt can be repeated.

    at/RANK = TOKEN                 a worker has arrived; every attempt has a new token
    go/TOKEN = NAME                 rank 0's answer to that arrival
    NAME/gather/ROUND/RANK = VALUE  the values of `all_gather`
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from time import sleep
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from paceline.comm.folder_store import FolderStore
from paceline.core.errors import CommunicationError, CommunicationTimeout
from paceline.core.processes import STORE_VARIABLE
from paceline.core.secret import ForgedError, Secret, run_secret
from paceline.core.timing import ActiveTimer
from paceline.core.world import World

# Workers may arrive at their first rendezvous far apart: imports and data preparation take different times.
JOIN_TIMEOUT_S = 300.0
MIN_POLL_S, MAX_POLL_S = 0.0002, 0.02

_has_joined = False  # whether this process has completed a rendezvous


@dataclass(frozen=True)
class RendezvousPoint:
    """A key-value store for the rendezvous, and a `check` that may raise while workers wait."""

    store: Any
    check: Callable[[], None] = lambda: None


class Rendezvous:
    """A completed rendezvous. All workers of the world construct it together.

    `offers` are the JSON values that the workers passed as `offer`, by rank. `store` belongs to this rendezvous only;
    keep the `Rendezvous` alive while it is in use. Construction waits `timeout_s`; the first one in a process waits at
    least JOIN_TIMEOUT_S. `at` replaces the store that the environment names.
    """

    def __init__(self, world: World, timeout_s: float, offer: Any = None, at: RendezvousPoint | None = None) -> None:
        global _has_joined
        self._world = world
        self._timeout_s = timeout_s
        self._answered: dict[int, bytes] = {}
        self._num_rounds = 0
        self.check = at.check if at is not None else None  # may raise while workers connect
        is_first = not _has_joined and not dist.is_initialized()
        with self._limited(max(timeout_s, JOIN_TIMEOUT_S) if is_first else timeout_s):
            # Referenced here because torch does not keep a store alive that is written in Python.
            self._run_store = _run_store(world) if at is None else at.store
            name = secrets.token_hex(8) if world.is_main else self._arrive()
            self.store: Any = dist.PrefixStore(name, self._run_store)  # type: ignore[attr-defined]
            self.offers = self._gather(offer, lambda: self._answer_arrivals(name))
        _has_joined = True

    def all_gather(self, value: Any) -> list[Any]:
        """Every worker's JSON value, by rank. All workers call it together."""
        with self._limited(self._timeout_s):
            return self._gather(value)

    def _arrive(self) -> str:
        """The name of the rendezvous, from rank 0."""
        token = secrets.token_hex(8)
        self._run_store.set(f"at/{self._world.rank}", token)
        self._wait(self._run_store, {0: f"go/{token}"})
        return str(self._run_store.get(f"go/{token}").decode())

    def _answer_arrivals(self, name: str) -> None:
        """On rank 0. A token may be of an earlier rendezvous, or of an attempt that timed out: a new one follows."""
        store = self._run_store
        for rank in range(1, self._world.size) if self._world.is_main else ():
            if store.check([f"at/{rank}"]) and (token := store.get(f"at/{rank}")) != self._answered.get(rank):
                store.set(f"go/{token.decode()}", name)
                self._answered[rank] = token

    def _gather(self, value: Any, on_poll: Callable[[], None] = lambda: None) -> list[Any]:
        keys = {rank: f"gather/{self._num_rounds}/{rank}" for rank in range(self._world.size)}
        self._num_rounds += 1
        self.store.set(keys[self._world.rank], json.dumps(value))
        self._wait(self.store, keys, on_poll)
        return [json.loads(self.store.get(key)) for key in keys.values()]

    def _wait(self, store: Any, keys: Mapping[int, str], on_poll: Callable[[], None] = lambda: None) -> None:
        """Return when all keys exist. `keys` are listed by the rank that sets them."""
        # Not store.wait, in which signals are not handled.
        poll_s = MIN_POLL_S
        while not store.check(list(keys.values())):
            if self._waited.update() > self._limit_s:
                missing = [rank for rank, key in keys.items() if not store.check([key])]
                raise CommunicationTimeout(
                    f"rank {self._world.rank} waited {self._limit_s:g} s for the world of {self._world.size} workers: "
                    f"ranks {missing} did not join"
                )
            on_poll()
            if self.check is not None:
                self.check()
            sleep(poll_s)
            poll_s = min(1.3 * poll_s, MAX_POLL_S)

    @contextmanager
    def _limited(self, limit_s: float) -> Iterator[None]:
        """Limit the waits in this block, and translate the errors of stores."""
        self._limit_s, self._waited = limit_s, ActiveTimer()
        rank = self._world.rank
        try:
            yield
        except CommunicationError:
            raise
        except ForgedError as error:
            raise CommunicationError(f"rank {rank} found a forged value in the rendezvous store: {error}") from None
        except (RuntimeError, OSError) as error:
            raise CommunicationError(f"rank {rank} cannot reach the rendezvous store: {error}") from None


class SignedStore(dist.Store):  # type: ignore[misc,name-defined]
    """Signs the values of a store that others can write to, and rejects values without a valid signature."""

    def __init__(self, store: Any, secret: Secret) -> None:
        super().__init__()
        self._store = store
        self._secret = secret

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, self._sign(key, value))

    def get(self, key: str) -> bytes:
        return self._secret.check(self._store.get(key), f"the value of {key}")

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Set the value if there is none yet; other comparisons are not supported. Returns the value that is set."""
        assert not expected
        return self._secret.check(self._store.compare_set(key, "", self._sign(key, value)), f"the value of {key}")

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))  # counters cannot be signed

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys) if timeout is None else self._store.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete_key(key))

    def clone(self) -> SignedStore:
        return SignedStore(self._store.clone(), self._secret)

    @property
    def timeout(self) -> timedelta:
        return self._store.timeout  # type: ignore[no-any-return]

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    def _sign(self, key: str, value: str | bytes) -> bytes:
        content = value.encode() if isinstance(value, str) else bytes(value)
        return self._secret.sign(content, f"the value of {key}")


def private_store(store: Any, secret: Secret | None, purpose: str) -> Any:
    """The part of a store that serves this purpose. With a secret, others can neither find nor write its keys."""
    if secret is None:
        return dist.PrefixStore(f"paceline/{purpose}", store)  # type: ignore[attr-defined]
    return SignedStore(dist.PrefixStore(secret.name(purpose), store), secret)  # type: ignore[attr-defined]


def _run_store(world: World) -> Any:
    """The store that all workers of this run can reach."""
    store: Any
    if path := os.environ.get(STORE_VARIABLE):  # set by Paceline's launcher for workers of one host
        return FolderStore(Path(path))  # a folder of this start, private to this user
    if dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
    else:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ValueError(
                f"RANK and WORLD_SIZE are set but not {' and '.join(missing)}: start the script with torchrun, "
                "`paceline run` or paceline.launch, or unset RANK and WORLD_SIZE to train with one worker"
            )
        store = _environment_store(world.rank, world.size)
    return private_store(store, run_secret(), _start_name())


def generation_store(number: int) -> Any:
    """The store of one generation of a run whose workers change; see `run.membership`."""
    if path := os.environ.get(STORE_VARIABLE):
        # Nobody connects the generation before the last one any more: it ended when the last one was announced.
        shutil.rmtree(f"{path}-{number - 2}", ignore_errors=True)
        return FolderStore(Path(f"{path}-{number}"))
    return private_store(_agent_store(), run_secret(), f"{_run_id()}/{_start_name()}/generation-{number}")


def nodes_store() -> Any:
    """The store that the agents of all nodes share, for a worker of one of them."""
    return private_store(_agent_store(), run_secret(), nodes_purpose(_run_id()))


def nodes_purpose(run_id: str) -> str:
    return f"{run_id}/nodes"


def _run_id() -> str:
    return os.environ.get("TORCHELASTIC_RUN_ID", "run")


def _start_name() -> str:
    """Restarted workers may find the store of the previous attempt."""
    return f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


@lru_cache(maxsize=1)
def _agent_store() -> Any:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, timeout=timedelta(seconds=JOIN_TIMEOUT_S))  # type: ignore[attr-defined]


@lru_cache(maxsize=1)  # rank 0 may host the store, which must then live as long as the process
def _environment_store(rank: int, size: int) -> Any:
    store, _, _ = next(rendezvous("env://", rank, size, timeout=timedelta(seconds=JOIN_TIMEOUT_S)))
    return store
