"""What keeps vLLM's own processes from outliving or outrunning the worker that started them.

vLLM runs its engine in a child process that nobody watches: killed, the worker would leave it
behind with all its GPU memory, and a Ctrl-C at the terminal would reach it before the worker could
drain. So the child asks the kernel to die with the worker, and leaves the worker's process group.
It does so itself, in a fork by a hook, in a spawned interpreter as a vLLM plugin (entry point
`vllm.general_plugins`). Signal a worker by its pid (systemd: `KillMode=mixed`).
"""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

OWNER: Final = "HEADRACE_ENGINE_OWNER"
"""Environment variable: the pid of the worker that starts an engine."""

_PR_SET_PDEATHSIG: Final = 1  # <linux/prctl.h>

_hooked = False


@contextmanager
def children_bound() -> Iterator[None]:
    """Bind to this process the children it starts in the block, by whichever method.

    Enter it in the main thread: the kernel takes the death of the thread that forked for the
    parent's.
    """
    global _hooked
    if not _hooked:
        os.register_at_fork(after_in_child=bind_to_worker)
        _hooked = True
    os.environ[OWNER] = str(os.getpid())
    try:
        yield
    finally:
        os.environ.pop(OWNER, None)  # a spawned child has its own copy


def bind_to_worker() -> None:
    """In a worker's child, in its earliest moment: die with the worker, leave its process group.

    Anywhere else it does nothing, so it is harmless to any other user of vLLM.
    """
    owner = os.environ.get(OWNER)
    if owner is None or owner == str(os.getpid()):
        return
    del os.environ[OWNER]  # vLLM itself binds what this process starts
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if not _is_alive(int(owner)):  # asked after the line above, so that no moment is unguarded
        os._exit(1)
    with suppress(PermissionError):  # it leads a session: a group of its own already
        os.setpgid(0, 0)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
