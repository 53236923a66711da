"""For benchmarks/spot.py, where it is on an engine's PYTHONPATH: the local engine sleeps before
each step. Its bits stay the same.

So a machine of two cores can play many hosts whose speed is their own.
"""

import os
import sys

if "rlpipe.extras.local_engine.server" in sys.orig_argv:
    import time

    from rlpipe.extras.local_engine.scheduler import Scheduler

    step, seconds = Scheduler.step, float(os.environ["SLOW_STEP_S"])

    def slow_step(self: Scheduler) -> None:
        time.sleep(seconds)
        step(self)

    Scheduler.step = slow_step
