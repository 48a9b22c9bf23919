"""The programs that compose's images bring, where this machine has them."""

import shutil

import pytest

from headrace.broker import find_binary


def nginx() -> str:
    """Return nginx's path; skip without it."""
    # Debian keeps it out of users' PATH.
    found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if found is None:
        pytest.skip("nginx is not installed: apt-get install nginx-light")
    return found


def nats_server() -> str:
    """Return the path of a nats-server that is new enough."""
    return str(find_binary())
