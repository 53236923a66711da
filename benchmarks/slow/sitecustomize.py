"""For benchmarks/spot.py and overlap.py, where it is on PYTHONPATH: the local engine sleeps before
each step (SLOW_STEP_S), the trainer before each update (SLOW_UPDATE_S). Their bits stay the same.

So a machine of two cores can play many machines whose speed is their own.
"""

import os
import sys

if "SLOW_STEP_S" in os.environ and "rlpipe.extras.local_engine.server" in sys.orig_argv:
    import time

    from rlpipe.extras.local_engine.scheduler import Scheduler

    step, step_s = Scheduler.step, float(os.environ["SLOW_STEP_S"])

    def slow_step(self: Scheduler) -> None:
        time.sleep(step_s)
        step(self)

    Scheduler.step = slow_step

# the launcher has the name of the ranks' program among its arguments too
if "SLOW_UPDATE_S" in os.environ and sys.orig_argv[-2:-1] == ["rlpipe.trainer.server"] and "--" not in sys.orig_argv:
    import time

    from rlpipe.trainer.step import Resident

    apply, update_s = Resident.apply, float(os.environ["SLOW_UPDATE_S"])

    def slow_apply(self: Resident, *arguments: object) -> None:
        time.sleep(update_s)
        apply(self, *arguments)

    Resident.apply = slow_apply
