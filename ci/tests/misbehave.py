"""A patch file for the tests: the hand-written path, misbehaving as the case's seed says."""

import ctypes
import hashlib
import os
import re
import signal
import subprocess
import threading
import time

import torch
import torch.distributed as dist

from ci.tests import misbehave_seeds as seeds
from suites import observe, paths

real_load = paths.load


def load(path):
    build = real_load(path)

    def misbehaving(case, device, notice):
        seed, rank = case.seed, dist.get_rank()
        if seed == seeds.EXITS and rank == 0:
            os._exit(7)
        if seed == seeds.REFUSES or (seed == seeds.ONE_REFUSES and rank == 0):
            raise NotImplementedError("row-parallel heads are not supported\nfor this model\n\nsecond paragraph")
        if seed == seeds.SLIP:
            _first, _second = [1, 2, 3]
        if seed == seeds.INVALID:
            import pydantic

            pydantic.create_model("Config", stage=(int, ...))(stage="three")
        if seed == seeds.DIES_SAVING:
            observe.RankObservation.save = lambda self, path: os._exit(9)
        if seed == seeds.KILLED_SAVING:
            observe.RankObservation.save = lambda self, path: os.kill(os.getpid(), signal.SIGKILL)
        trainer = build(case, device, notice)
        step = trainer.step
        done = 0

        def bad_step():
            nonlocal done
            done += 1
            if seed == seeds.HANG and rank == 1 and done == 2:
                stuck_here()
            if done == (case.steps if seed == seeds.SKIPS else 2) and seed in WAYS:
                WAYS[seed](rank)
            if seed == seeds.ONE_RAISES and rank == 1:
                raise RuntimeError("boom on one rank only")
            if seed == seeds.KILLED and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if seed == seeds.NATIVE:
                ctypes.PyDLL(None).sleep(1000)  # sleeps with the interpreter lock held
            if seed == seeds.LATE_REFUSAL:
                raise NotImplementedError("too late to refuse")
            if seed == seeds.CHATTY:
                print("x" * 1000)
            return step()

        trainer.step = bad_step
        return trainer

    return misbehaving


def stuck_here():
    time.sleep(1000)


# Ways to hang, from the second step's update on; rank 1 is the one to blame.


def skips(rank):
    if rank == 1:  # all of the last step's update, so that nothing comes after
        dist.all_reduce = lambda *args, **kwargs: None


def skips_one(rank):
    real = dist.all_reduce
    left = [3]

    def all_reduce(*args, **kwargs):
        left[0] -= 1
        return None if left[0] == 0 else real(*args, **kwargs)

    if rank == 1:
        dist.all_reduce = all_reduce


def swaps(rank):
    tensor = torch.ones(2144)
    calls = [lambda: dist.all_reduce(tensor, async_op=True), lambda: all_gather(tensor, async_op=True)]
    pending = [call() for call in (calls if rank == 0 else reversed(calls))]
    for work in pending:
        work.wait()


def all_gather(tensor, **options):
    return dist.all_gather([torch.empty_like(tensor) for _ in range(dist.get_world_size())], tensor, **options)


def sizes(rank):
    dist.all_reduce(torch.ones(2144 if rank == 0 else 2145))


def kinds(rank):
    if rank == 0:
        dist.all_reduce(torch.ones(2144))
    else:
        all_gather(torch.ones(2144))


def leaves(rank):
    if rank == 0:
        dist.barrier()


def daemon(rank):
    if rank == 1:
        subprocess.Popen(["sleep", "1234"], start_new_session=True)
        raise ValueError("and goes")


def stops(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def python_loop(rank):
    while rank == 1:
        pass


def c_loop(rank):
    if rank == 1:
        re.match(r"(a+)+$", "a" * 60 + "b")  # for ages, with the interpreter lock held


def free_c_loop(rank):
    if rank == 1:
        hashlib.pbkdf2_hmac("sha256", b"x", b"y", 2**31 - 1)  # for an hour, without the interpreter lock


def deadlock(rank):
    if rank == 1:
        one, two, both = threading.Lock(), threading.Lock(), threading.Barrier(2)

        def takes_one():
            with one:
                both.wait()
                two.acquire()

        def takes_two():
            with two:
                both.wait()
                one.acquire()

        threading.Thread(target=takes_one, name="other", daemon=True).start()
        takes_two()


WAYS = {
    seeds.SKIPS: skips,
    seeds.SKIPS_ONE: skips_one,
    seeds.SWAPS: swaps,
    seeds.SIZES: sizes,
    seeds.KINDS: kinds,
    seeds.LEAVES: leaves,
    seeds.DAEMON: daemon,
    seeds.STOPS: stops,
    seeds.PYTHON_LOOP: python_loop,
    seeds.C_LOOP: c_loop,
    seeds.FREE_C_LOOP: free_c_loop,
    seeds.DEADLOCK: deadlock,
}


paths.load = load
