"""The gate of a node: configuration and bucket together, and what turns it on."""

import hashlib
import json
from pathlib import Path

import pytest

from headrace import tenants, topology
from headrace.bus import Bus
from headrace.lifecycle import running_tasks
from headrace.settings import NO_CONFIG, BadSetting, load_config
from ingress import gate
from ingress.auth import Caller
from ingress.gate import Entrance
from schemas.errors import InvalidApiKey
from schemas.tenant import Entry, Key
from tests.broker import with_bus
from tests.servers import NatsServer
from tests.signing import RSA_KEY, jwk, pem
from tests.waiting import until

HOST = [(b"host", b"localhost")]
KEY = Key(tenant="acme", sha256=hashlib.sha256(b"k").hexdigest())
SHOWN = [*HOST, (b"authorization", b"Bearer k")]


@pytest.fixture
def tenants_url(own_nats: NatsServer) -> str:
    async def apply(bus: Bus) -> None:
        await topology.apply(bus)

    with_bus(own_nats.url, apply)
    return own_nats.url


def entrance(tmp_path: Path, text: str) -> Entrance:
    file = tmp_path / "headrace.toml"
    file.write_text(text)
    return Entrance(load_config(file), host="127.0.0.1")


def test_the_first_key_turns_authentication_on_and_revoking_it_does_not_turn_it_off(
    tenants_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADRACE_API_KEY", raising=False)

    async def run(bus: Bus) -> None:
        door = Entrance(NO_CONFIG, host="127.0.0.1")
        heard: list[bool] = []
        await door.open(bus, on_change=lambda: heard.append(door.gate.keyless))
        assert door.gate.identify(HOST) == Caller("default")
        await tenants.put(bus, "key", KEY.id, Entry(value=KEY))
        await until(lambda: not door.gate.keyless)
        assert door.gate.identify(SHOWN) == Caller("acme")
        await tenants.put(bus, "key", KEY.id, Entry(value=KEY, gone_s=1.0))
        await until(lambda: len(heard) == 3)
        assert heard == [True, False, False]
        for headers in (HOST, SHOWN):
            with pytest.raises(InvalidApiKey):
                door.gate.identify(headers)
        later = Entrance(NO_CONFIG, host="127.0.0.1")
        await later.open(bus, on_change=lambda: None)
        assert not later.gate.keyless

    with_bus(tenants_url, run)


def test_the_key_of_the_environment_is_this_processs_own(
    tenants_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(bus: Bus) -> None:
        monkeypatch.setenv("HEADRACE_API_KEY", "k")
        keyed = Entrance(NO_CONFIG, host="0.0.0.0")
        monkeypatch.delenv("HEADRACE_API_KEY")
        keyless = Entrance(NO_CONFIG, host="127.0.0.1")
        for door in (keyed, keyless):
            await door.open(bus, on_change=lambda: None)
        assert keyed.gate.identify(SHOWN) == Caller("default")
        assert keyless.gate.keyless
        assert await tenants.read_bucket(bus) == {}

    with_bus(tenants_url, run)


def test_a_key_that_left_the_file_opens_nothing_after_the_next_start(
    tenants_url: str, tmp_path: Path
) -> None:
    tables = '[[tenants]]\nname = "acme"\n'
    keys = f'[[keys]]\ntenant = "acme"\nsha256 = "{KEY.sha256}"\n'

    async def run(bus: Bus) -> None:
        first, second = (entrance(tmp_path, text) for text in (tables + keys, tables))
        other = Entrance(NO_CONFIG, host="127.0.0.1")
        await other.open(bus, on_change=lambda: None)
        await first.open(bus, on_change=lambda: None)
        await until(lambda: other.gate.directory.has_keys)
        assert not other.gate.keyless
        assert other.gate.identify(SHOWN)
        await second.open(bus, on_change=lambda: None)
        for door in (second, other):
            await until(lambda door=door: door.gate.directory.is_gone("acme", KEY.id))  # type: ignore[misc]
            with pytest.raises(InvalidApiKey):
                door.gate.identify(SHOWN)

    with_bus(tenants_url, run)


def test_keys_that_cannot_verify_anything_are_an_error_at_start(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    for table in (
        'jwks_file = "gone.json"',
        'jwks_file = "broken.json"',
        'key = "-----BEGIN PUBLIC KEY-----\\nAAAA\\n-----END PUBLIC KEY-----"',
    ):
        with pytest.raises(BadSetting, match=r"\[jwt\]"):
            entrance(tmp_path, f"[jwt]\n{table}\n")


def test_keys_that_can_are_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "keys.json").write_text(json.dumps({"keys": [jwk(RSA_KEY, "r")]}))
    entrance(tmp_path, '[jwt]\njwks_file = "keys.json"\n')
    entrance(tmp_path, f'[jwt]\nkey = """{pem(RSA_KEY)}"""\n')
    assert caplog.text == ""
    entrance(tmp_path, '[jwt]\nkey = "too short"\n')
    assert "shorter than 32 bytes" in caplog.text
    assert "too short" not in caplog.text


def test_a_long_configuration_is_written_while_the_node_serves(
    tenants_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "AT_ONCE_MAX", 10)
    text = "".join(f'[[tenants]]\nname = "t{n}"\n' for n in range(11))

    async def run(bus: Bus) -> None:
        door = entrance(tmp_path, text)
        await door.open(bus, on_change=lambda: None)
        assert door.gate.directory.knows("t10")
        assert await tenants.read_bucket(bus) == {}
        async with running_tasks() as tasks:
            door.start(tasks)
            await until(lambda: _count(bus, 11))

    with_bus(tenants_url, run)


async def _count(bus: Bus, count: int) -> bool:
    return len(await tenants.read_bucket(bus)) == count
