"""`python -m bench.tenants`: what tenants cost an ingress. 100,000 tenants, each with a key, read
from the bucket and from headrace.toml; and the CPU that one request's authentication takes."""

import asyncio
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jwt
import psutil

from headrace import tenants, topology
from headrace.bus import BusSettings, connection
from headrace.settings import ApiKey, load_config
from headrace.tenant_settings import JwtSettings, Tenancy
from ingress.auth import Gate
from ingress.jwt import Verifier, static_keys
from schemas.tenant import Tenant, Tier
from tests.servers import NatsServer

COUNT = 100_000
SECRET = "s" * 32
ROUNDS = 20_000


def main() -> None:
    """Print one line for each figure."""
    if len(sys.argv) > 2:
        asyncio.run(_load(sys.argv[1], sys.argv[2]))
        return
    _authentication()
    _file()
    with tempfile.TemporaryDirectory() as folder:
        server = NatsServer(Path(folder))
        server.start()
        try:
            asyncio.run(_fill(server.url))
            # In a process of its own, so that its memory is its own.
            asyncio.run(_child("load", server.url))
        finally:
            server.stop()


def _authentication() -> None:
    key = b"k" * 43
    settings = JwtSettings(key=SECRET)
    gate = Gate(
        [("acme", hashlib.sha256(key).hexdigest())],
        verifier=Verifier(settings, static_keys(settings)),
    )
    now_s = int(time.time())
    token = jwt.encode({"tenant": "acme", "exp": now_s + 3600}, SECRET, "HS256")
    for name, shown in (("an API key", key), ("a token seen before", token.encode())):
        headers = [(b"host", b"x"), (b"authorization", b"Bearer " + shown)]
        gate.identify(headers)
        print(f"{name}: {_cpu_us(lambda headers=headers: gate.identify(headers)):.1f} µs")
    fresh = iter(
        [
            jwt.encode({"tenant": "acme", "exp": now_s + 3600, "n": n}, SECRET, "HS256").encode()
            for n in range(2000)
        ]
    )
    print(f"a token seen first: {_cpu_us(lambda: gate.identify_key(next(fresh)), 2000):.1f} µs")


def _cpu_us(act: Callable[[], object], rounds: int = ROUNDS) -> float:
    started_s = time.process_time()
    for _ in range(rounds):
        act()
    return (time.process_time() - started_s) / rounds * 1e6


def _words() -> tuple[list[ApiKey], Tenancy]:
    names = [f"tenant-{n:06}" for n in range(COUNT)]
    keys = [ApiKey(name, hashlib.sha256(name.encode()).hexdigest()) for name in names]
    tiers = {"gold": Tier(name="gold", requests_per_minute=600, weight=2)}
    return keys, Tenancy({name: Tenant(name=name, tier="gold") for name in names}, tiers)


def _file() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "headrace.toml"
        with path.open("w") as file:
            file.write('[[tiers]]\nname = "gold"\n')
            for key in _words()[0]:
                file.write(f'[[tenants]]\nname = "{key.tenant}"\ntier = "gold"\n')
                file.write(f'[[keys]]\ntenant = "{key.tenant}"\nsha256 = "{key.sha256}"\n')
        started_s = time.monotonic()
        config = load_config(path)
        print(f"headrace.toml: {len(config.keys.keys)} in {time.monotonic() - started_s:.2f} s")


async def _fill(url: str) -> None:
    keys, tenancy = _words()
    async with connection(BusSettings(url), name="bench", timeout_s=10) as bus:
        await topology.apply(bus)
        started_s = time.monotonic()
        changed = await tenants.seed(bus, {}, keys, tenancy)
        print(f"seeding the bucket: {changed} entries in {time.monotonic() - started_s:.2f} s")


async def _child(*args: str) -> None:
    child = await asyncio.create_subprocess_exec(sys.executable, "-m", "bench.tenants", *args)
    await child.wait()


async def _load(_: str, url: str) -> None:
    async with connection(BusSettings(url), name="bench", timeout_s=10) as bus:
        process = psutil.Process(os.getpid())
        before = process.memory_info().rss
        directory = tenants.Directory()
        before_cpu_s = time.process_time()
        started_s = time.monotonic()
        await tenants.Followed(bus, directory).start()
        took_s, cpu_s = time.monotonic() - started_s, time.process_time() - before_cpu_s
        for n in range(COUNT):
            directory.policy(f"tenant-{n:06}")
        grown = process.memory_info().rss - before
        known = directory.find(hashlib.sha256(b"tenant-000007").digest())
        print(
            f"reading the bucket: {took_s:.2f} s ({cpu_s:.2f} of CPU),"
            f" {grown / 2**20:.0f} MiB more, and it knows {known}"
        )


if __name__ == "__main__":
    main()
