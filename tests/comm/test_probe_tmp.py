import torch, time, os
from worker_pool import WorkerPool, WorkersFailed
from paceline.comm.process_group import ProcessGroupCommunicator
from paceline.core.world import World
import torch.distributed as dist

def leave():
    w = World.from_environment()
    c = ProcessGroupCommunicator(w, timeout_s=15)
    c.all_reduce(torch.ones(3)).wait()
    if w.rank == 1:
        c.close()
        return None
    t = time.monotonic()
    try:
        c.all_reduce(torch.ones(3)).wait()
    except Exception as e:
        return type(e).__name__, str(e), time.monotonic() - t
def slow():
    w = World.from_environment()
    c = ProcessGroupCommunicator(w, timeout_s=0.5)
    c.all_reduce(torch.ones(3)).wait()
    if w.rank == 1:
        dist.barrier()
        return None
    t = time.monotonic()
    try:
        c.all_reduce(torch.ones(3)).wait()
    except Exception as e:
        dist.barrier()
        return type(e).__name__, str(e), time.monotonic() - t
def nojoin():
    w = World.from_environment()
    if w.rank == 1:
        dist.barrier(); return
    t = time.monotonic()
    try:
        ProcessGroupCommunicator(w, timeout_s=0.5)
    except Exception as e:
        dist.barrier()
        return type(e).__name__, str(e), time.monotonic() - t
def test_a(pool):
    for f in (leave, slow, nojoin):
        for n in (2, 3):
            t = time.monotonic()
            try:
                print(f.__name__, n, pool.run(f, n))
            except Exception as e: print(f.__name__, n, "FAILED", e)
            print(time.monotonic() - t)
def closed():
    w = World.from_environment()
    c = ProcessGroupCommunicator(w, timeout_s=5)
    c.close()
    out = []
    for op in (c.all_reduce, c.broadcast):
        try: op(torch.ones(2))
        except Exception as e: out.append((type(e), str(e)))
    try: c.close()
    except Exception as e: out.append((type(e), str(e)))
    return out
def mism():
    w = World.from_environment()
    c = ProcessGroupCommunicator(w, timeout_s=2)
    try: c.all_reduce(torch.ones(2 + w.rank)).wait()
    except Exception as e: return repr(e)
    return "ok"
def test_b(pool):
    print(pool.run(closed, 2))
    try: print(pool.run(mism, 2))
    except BaseException as e: print(e)
