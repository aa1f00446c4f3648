"""Rank 1 is no longer there, or does not come, while the others wait for it: `vanish.py HOW`."""

import os
import signal
import sys
import time

from small_case import now, work

from refimpl.collectives import MpiCollectives

group = MpiCollectives(timeout=2.0)
work(group)
if group.rank == 1:
    now()
    match sys.argv[1]:
        case "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exits":
            sys.exit(0)
        case "exits with a status":
            sys.exit(3)
        case "never arrives":
            time.sleep(600)
work(group)
print(f"rank {group.rank} finished")
