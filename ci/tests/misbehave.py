"""A patch file for the tests: the hand-written path, misbehaving as the case's seed says."""

import ctypes
import os
import signal
import time

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
        trainer = build(case, device, notice)
        step = trainer.step
        done = 0

        def bad_step():
            nonlocal done
            done += 1
            if seed == seeds.HANG and rank == 1 and done == 2:
                stuck_here()
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


paths.load = load
