"""A system with tenants, for tests: on a broker of its own, since what it holds in the bucket
`tenants` would guard the doors of every other system there.
"""

import hashlib
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.pipeline.asking import CHAT, chat
from tests.pipeline.conftest import Mode, Node, _apply, front, page, worker
from tests.queue import headrace
from tests.servers import NatsServer, wait_ready
from tests.signing import SECRET
from tests.waiting import wait_for

KEYS = {
    name: f"sk-{name}-{secrets.token_hex(16)}"
    for name in ("acme", "small", "narrow", "quick", "ender", "share-1", "share-2", "own")
}
CONFIG = """
[[tiers]]
name = "tiny"
max_input_tokens = 40
max_output_tokens = 20
[[tenants]]
name = "acme"
[[tenants]]
name = "small"
tier = "tiny"
[[tenants]]
name = "narrow"
models = ["other"]
[[tenants]]
name = "quick"
deadline_s = 1
[[tenants]]
name = "ender"
on_revoke = "end"
[[tenants]]
name = "share-1"
share_prefixes = true
[[tenants]]
name = "share-2"
share_prefixes = true
[mtls]
header = "x-client-dn"
proxies = ["127.0.0.1"]
"""


@dataclass(frozen=True)
class House:
    """A system with tenants."""

    nats_url: str
    doors: tuple[Node, ...]
    streamers: tuple[Node, ...]

    @property
    def front(self) -> tuple[Node, ...]:
        return (*self.doors, *self.streamers)

    def client(self, key: str | None, door: int = 0) -> httpx.Client:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.Client(
            base_url=self.doors[door].url, timeout=30, follow_redirects=True, headers=headers
        )

    def ask(self, key: str | None, door: int = 0, **more: Any) -> httpx.Response:
        with self.client(key, door) as client:
            return client.post(CHAT, json=chat(**({"max_tokens": 1} | more)))

    def opens(self, key: str) -> list[bool]:
        """Tell for each door whether a key opens it."""
        answers = [
            httpx.get(
                f"{door.url}/v1/models", headers={"authorization": f"Bearer {key}"}, timeout=30
            )
            for door in self.doors
        ]
        return [answer.status_code == 200 for answer in answers]

    def create(self, tenant: str) -> str:
        result = headrace(self.nats_url, "keys", "create", "--tenant", tenant)
        assert result.exit_code == 0, result.output
        return result.stdout.splitlines()[-1]

    def key_id(self, tenant: str) -> str:
        listed = headrace(self.nats_url, "keys", "list", "--tenant", tenant).stdout
        _, line = listed.splitlines()
        return line.split()[0]


@contextmanager
def open_house(mode: Mode, folder: Path) -> Iterator[House]:
    """Start a house with two doors for the length of a block."""
    config = folder / "tenants.toml"
    keys = "".join(
        f'[[keys]]\ntenant = "{name}"\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\n'
        for name, key in KEYS.items()
    )
    config.write_text(f'{CONFIG}\n{keys}\n[jwt]\nkey = "{SECRET}"\naudience = "headrace"\n')
    with ExitStack() as cleanup:
        nats = NatsServer(folder)
        cleanup.callback(nats.stop)
        nats.start()
        _apply(nats.url)

        def fronts(module: str, count: int, *args: str) -> tuple[Node, ...]:
            names = [f"{module}-{number}" for number in range(1, count + 1)]
            found = tuple(front(module, nats.url, folder, *args, name=name) for name in names)
            for each in found:
                cleanup.callback(each.process.stop)
            return found

        engine = worker("worker", nats.url, folder)
        cleanup.callback(engine.process.stop)
        streamers = fronts("streamer", 1) if mode == "split" else ()
        known = ("--config", str(config))
        doors = fronts("gateway", 2, *known) if mode == "gateway" else fronts("ingress", 2, *known)
        found = House(nats.url, doors, streamers)
        for each in (engine, *found.front):
            wait_ready(each.process, each.admin_url)
        for door in doors:
            readyz = f"{door.admin_url}/readyz"
            wait_for(lambda url=readyz: "sim" in page(url), within_s=15, what="the model")
        yield found
