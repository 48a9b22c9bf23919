"""Runs one command and tells what it took, as JSON. Rule: a small process, by the stdlib alone.

The kernel counts into a process's peak of memory what its parent held when it started it: so the
benchmark, which holds much, has this one start what it measures.
"""

import json
import resource
import subprocess
import sys
import time


def main() -> None:
    """Run the command line's arguments; print the time, the peak, the exit status and stdout."""
    began_s = time.perf_counter()
    done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, text=True, check=False)
    took_s = time.perf_counter() - began_s
    peak_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    told = {"took_s": took_s, "peak_bytes": peak_kib * 1024}
    json.dump(told | {"status": done.returncode, "said": done.stdout}, sys.stdout)


if __name__ == "__main__":
    main()
