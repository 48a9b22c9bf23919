"""What memory a process takes, as Linux counts it (proc(5), `/proc/[pid]/status`)."""

from pathlib import Path


def own_bytes(pid: int) -> int:
    """Return the resident bytes that a process has written itself.

    How they grow is its own doing: pages of files and libraries are left out, of which a process
    has the greater part to itself the fewer others run.
    """
    return _status_bytes(pid, "RssAnon")


def resident_bytes(pid: int) -> int:
    """Return all that a process has resident."""
    return _status_bytes(pid, "VmRSS")


def peak_bytes(pid: int) -> int:
    """Return the most that a process has ever had resident."""
    return _status_bytes(pid, "VmHWM")


def _status_bytes(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024
