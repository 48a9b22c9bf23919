"""One `headrace up` without keys for all tests of this folder; another with keys for a few.

Clients are installed by `make test-clients` in an environment of its own. Where they are not, the
files here cannot even be imported: they are left out, as their marker leaves them out anyway.
"""

import hashlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.clients.serving import serving

if find_spec("langchain_openai") is None or find_spec("schemathesis") is None:
    collect_ignore_glob = ["test_*.py"]

FOLDER = Path(__file__).parent
KEYS = {"default": "sk-first", "narrow": "sk-second", "paced": "sk-third"}
CONFIGURATION = """
[[tenants]]
name = "default"

[[tenants]]
name = "narrow"
requests_per_minute = 2
burst = 1
tokens_per_minute = 100000

[[tenants]]
name = "paced"
requests_per_minute = 60
burst = 1
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.clients)


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a system without keys serves."""
    with serving(tmp_path_factory.mktemp("up")) as found:
        yield found


@pytest.fixture(scope="session")
def keyed_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a system serves that knows the tenants of `KEYS`."""
    with serving(tmp_path_factory.mktemp("keyed"), configuration=configured()) as found:
        yield found


def configured() -> str:
    """Return a headrace.toml with tenants, limits and the digests of their keys."""
    keys = "".join(
        f'\n[[keys]]\ntenant = "{tenant}"\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\n'
        for tenant, key in KEYS.items()
    )
    return CONFIGURATION + keys
