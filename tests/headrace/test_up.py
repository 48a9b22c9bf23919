"""Facts about `headrace up` and `headrace ps`, with real processes.

nats-server is the real one; the tiers are stand-ins that answer /readyz and listen where clients
come, so that these facts are about `up` alone.
"""

import asyncio
import dataclasses
import itertools
import json
import os
import signal
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from headrace import broker, registry
from headrace import up as headrace_up
from headrace.banner import curl
from headrace.bus import BusSettings, connection
from headrace.datadir import DataDir, started_s
from headrace.settings import EngineKind
from headrace.sockets import listen
from headrace.up import Refused
from headrace.up_settings import UpSettings
from tests.headrace.running import listened_on, run, up
from tests.servers import free_port
from tests.waiting import until

ROOT = Path(__file__).parents[2]

TIER = """
import os, sys
from headrace import lifecycle
from headrace.http import serve
from headrace.sockets import listen
from headrace.telemetry import Readiness, admin_app, registry_of

def flag(name):
    return sys.argv[sys.argv.index(name) + 1]

async def publish():
    from headrace import broker, registry
    from headrace.bus import BusSettings, connection
    from schemas.model import ModelCard
    async with connection(BusSettings(url=os.environ["HEADRACE_NATS_URL"]), name="card") as bus:
        card = ModelCard(name="sim", created_s=1, max_model_len=1, files={})
        await registry.publish_card(bus, card, {})
    print("a line of log")
    print(card.name)

async def main(stop):
    if "--publish-card" in sys.argv:
        return await publish()
    app = admin_app(lambda: Readiness("ready"), registry_of("t", []))
    serving = await serve(app, host="127.0.0.1", port=int(flag("--admin-port")))
    door = listen(flag("--host"), int(flag("--port"))) if "--host" in sys.argv else None
    await stop.wait()
    print(f"{flag('--name')} drains\\n", end="", flush=True)
    await serving.close()

raise SystemExit(lifecycle.run(main))
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment in which `-m gateway` and the other tiers are the stand-ins."""
    for package in ("gateway", "ingress", "streamer", "workers"):
        folder = tmp_path / "stand-ins" / package
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
        (folder / "__main__.py").write_text(TIER)
    clean = {name: value for name, value in os.environ.items() if "HEADRACE" not in name}
    return clean | {"PYTHONPATH": f"{tmp_path / 'stand-ins'}:{ROOT}"}


async def _all_ready(environ: dict[str, str], cwd: Path, data_dir: Path) -> Any:
    """Return what `headrace ps` tells, None unless all are ready: who is kept from answering for a
    second is not, for as long."""
    listed = await asyncio.to_thread(run, environ, cwd, "ps", "--json", "--data-dir", data_dir)
    told = json.loads(listed.stdout)
    return told if {each["state"] for each in told["processes"]} == {"ready"} else None


@pytest.mark.slow
def test_up_serves_says_so_is_listed_and_stops_without_trace(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    async def scenario() -> None:
        async with up(tmp_path, environ, "--workers", 2) as system:
            url = system.line("NATS: ").removeprefix("NATS: ")
            endpoint = system.line("endpoint: ").removeprefix("endpoint: ")
            assert system.line("curl") == curl(endpoint, "sim", bearer=None)
            first = system.lines.index("headrace serves sim")
            said = ("headrace serves", "endpoint:", "NATS:", "curl")
            block = system.lines[first : first + len(said)]
            assert all(line.startswith(start) for line, start in zip(block, said, strict=True))
            assert not system.line("[")  # nats-server's own lines are in its file
            assert "Server is ready" in (system.data_dir / "nats.log").read_text()
            assert system.line("a line of log")
            await until(lambda: all(map(system.ready, system.ps())), within_s=60)

            async with connection(BusSettings(url=url), name="test", timeout_s=15) as bus:
                assert await registry.read_card(bus, "sim") is not None

            told: Any = await until(lambda: _all_ready(environ, tmp_path, system.data_dir))
            assert (told["endpoint"], told["nats_url"]) == (endpoint, url)
            assert [(process["name"], process["tier"]) for process in told["processes"]] == [
                ("nats", "nats"),
                ("gateway", "gateway"),
                ("worker-1", "worker"),
                ("worker-2", "worker"),
            ]
            pids = [process["pid"] for process in told["processes"]]
            urls = [endpoint, url, *(process["admin_url"] for process in told["processes"])]
            ports = {urlsplit(each).port for each in urls}
            assert len(ports) == 6
            assert listened_on(environ) >= ports

            second = await asyncio.to_thread(
                run, environ, tmp_path, "up", "--data-dir", system.data_dir
            )
            assert second.returncode == 1
            assert second.stderr.strip() == (
                f"headrace: another headrace up runs from {system.data_dir}"
            )

            applied = await asyncio.to_thread(
                run, environ, tmp_path, "topology", "apply", "--data-dir", system.data_dir
            )
            assert applied.returncode == 0
            assert "REQUESTS" in applied.stdout.split()

            system.process.send_signal(signal.SIGINT)
            assert await system.process.wait() == 0
        drained = [line for line in system.lines if line.endswith(" drains")]
        assert drained[0] == "gateway drains"
        assert sorted(drained[1:]) == ["worker-1 drains", "worker-2 drains"]
        assert not any(started_s(pid) for pid in pids)
        assert listened_on(environ) == set()
        assert not (system.data_dir / "run.json").exists()

    asyncio.run(scenario())


@pytest.mark.slow
def test_every_process_is_brought_back_and_the_port_of_nats_stays(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    async def scenario() -> None:
        async with up(tmp_path, environ) as system:
            await until(lambda: all(map(system.ready, system.ps())), within_s=60)
            before = system.ps()
            for name, process in before.items():
                os.kill(process["pid"], signal.SIGKILL)
                await until(
                    lambda name=name, process=process: (
                        system.ready(name)  # type: ignore[misc]
                        and system.ps()[name]["pid"] != process["pid"]
                    ),
                    within_s=60,
                )
            url = system.line("NATS: ").removeprefix("NATS: ")
            async with connection(BusSettings(url=url), name="test", timeout_s=15) as bus:
                await bus.api("INFO")

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_run_file_that_cannot_be_written_ends_nothing_and_is_written_later(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    async def scenario() -> None:
        async with up(tmp_path, environ) as system:
            await until(lambda: all(map(system.ready, system.ps())), within_s=60)
            before = system.ps()
            in_the_way = system.data_dir / ".run.json.new"
            in_the_way.mkdir()
            os.kill(before["worker-1"]["pid"], signal.SIGKILL)
            await until(lambda: any("cannot be written" in line for line in system.lines))
            in_the_way.rmdir()
            await until(lambda: system.ps()["worker-1"]["pid"] != before["worker-1"]["pid"])
            await until(lambda: system.ready("worker-1"), within_s=60)
            assert system.ps()["gateway"]["pid"] == before["gateway"]["pid"]

    asyncio.run(scenario())


def _flags(pid: int) -> dict[str, str]:
    """Return the flags that a process was started with, but for those of its admin port."""
    command = psutil.Process(pid).cmdline()
    pairs = dict(itertools.pairwise(command))
    return {name: pairs[name] for name in ("--host", "--port", "--public-url") if name in pairs}


@pytest.mark.slow
def test_split_runs_ingress_and_streamers_that_come_back_where_they_were(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    async def scenario() -> None:
        async with up(tmp_path, environ, "--split", "--ingress", 2, "--streamers", 2) as system:
            await until(lambda: all(map(system.ready, system.ps())), within_s=60)
            before = system.ps()
            tiers = [(name, process["tier"]) for name, process in before.items()]
            assert tiers == [
                ("nats", "nats"),
                *((f"streamer-{number}", "streamer") for number in (1, 2)),
                *((f"ingress-{number}", "ingress") for number in (1, 2)),
                ("worker-1", "worker"),
            ]
            listed = await asyncio.to_thread(
                run, environ, tmp_path, "ps", "--json", "--data-dir", system.data_dir
            )
            told = json.loads(listed.stdout)
            endpoints, streamers = told["endpoints"], told["streamers"]
            assert (len(endpoints), len(streamers)) == (2, 2)
            assert len({*endpoints, *streamers}) == 4
            assert told["endpoint"] == endpoints[0]
            said = [line for line in system.lines if line.startswith("endpoint: ")]
            assert said == [f"endpoint: {url}" for url in endpoints]
            said = [line for line in system.lines if line.startswith("WebSocket: ")]
            assert [line.replace("WebSocket: ws", "http") for line in said] == [
                f"{url}/v1/chat/completions" for url in streamers
            ]
            for number, url in enumerate(streamers, start=1):
                flags = _flags(before[f"streamer-{number}"]["pid"])
                assert flags["--public-url"] == url == f"http://127.0.0.1:{flags['--port']}"
            for name in ("streamer-1", "ingress-2"):
                pid = before[name]["pid"]
                flags = _flags(pid)
                os.kill(pid, signal.SIGKILL)
                await until(
                    lambda name=name, pid=pid: system.ps()[name]["pid"] != pid,  # type: ignore[misc]
                    within_s=60,
                )
                assert _flags(system.ps()[name]["pid"]) == flags
                await until(lambda name=name: system.ready(name), within_s=60)  # type: ignore[misc]
        drained = [line.removesuffix(" drains") for line in system.lines if "drains" in line]
        assert [name.rpartition("-")[0] for name in drained] == [
            "ingress", "ingress", "streamer", "streamer", "worker",
        ]  # fmt: skip

    asyncio.run(scenario())


def test_more_doors_without_split_are_refused_before_anything_starts(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    found = run(environ, tmp_path, "up", "--ingress", 2)
    assert found.returncode == 1
    assert "--split" in found.stderr
    assert not (tmp_path / ".headrace").exists()


@pytest.mark.slow
def test_a_second_signal_ends_all_at_once(tmp_path: Path, environ: dict[str, str]) -> None:
    package = tmp_path / "stand-ins" / "gateway" / "__main__.py"
    package.write_text(
        TIER.replace("await serving.close()", "await __import__('asyncio').sleep(60)")
    )

    async def scenario() -> None:
        async with up(tmp_path, environ, "--grace-s", 60) as system:
            pids = [process["pid"] for process in system.ps().values()]
            system.process.send_signal(signal.SIGTERM)
            await until(lambda: system.line("gateway drains"))
            system.process.send_signal(signal.SIGTERM)
            assert await system.process.wait() == 128 + signal.SIGTERM
            await until(lambda: not any(started_s(pid) for pid in pids))

    asyncio.run(scenario())


@pytest.mark.slow
def test_after_a_killed_up_the_next_one_starts_clean(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    async def scenario() -> None:
        async with up(tmp_path, environ) as system:
            pids = [process["pid"] for process in system.ps().values()]
            url = system.line("NATS: ")
            system.process.kill()
            await system.process.wait()
        listed = await asyncio.to_thread(
            run, environ, tmp_path, "ps", "--data-dir", system.data_dir
        )
        assert listed.returncode == 1
        assert listed.stderr.startswith("headrace: no headrace up runs from")
        async with up(tmp_path, environ, "--workers", 0) as system:
            assert not any(started_s(pid) for pid in pids)
            assert system.line("NATS: ") == url
            assert list(system.ps()) == ["nats", "gateway"]

    asyncio.run(scenario())


def test_a_model_that_cannot_be_published_is_a_refusal_that_leaves_nothing(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    package = tmp_path / "stand-ins" / "workers" / "__main__.py"
    package.write_text("raise SystemExit('no such model')")
    found = run(environ, tmp_path, "up", "--data-dir", "data", "--port", 0)
    assert found.returncode == 1
    assert "no such model" in found.stderr
    assert "" not in found.stdout.splitlines()
    assert found.stderr.strip().endswith(
        "headrace: the model cannot be published: status 1, reason above"
    )
    assert not (tmp_path / "data" / "run.json").exists()


@pytest.mark.slow
def test_up_uses_a_broker_of_others_under_names_that_are_its_own(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    (tmp_path / "theirs").mkdir()
    theirs = broker.prepare(DataDir(tmp_path / "theirs"))

    async def scenario() -> None:
        server = await asyncio.create_subprocess_exec(*theirs.argv)
        try:
            async with up(tmp_path, environ, "--nats-url", theirs.url) as system:
                assert system.line("NATS: ") == f"NATS: {theirs.url}"
                assert list(system.ps()) == ["gateway", "worker-1"]
                await until(lambda: all(map(system.ready, system.ps())), within_s=60)
            [worker] = [line for line in system.lines if line.endswith("-worker-1 drains")]
            assert worker.startswith(f"{socket.gethostname()}-")
            assert server.returncode is None
        finally:
            server.terminate()
            await server.wait()

    asyncio.run(scenario())


def test_vllm_that_is_not_installed_is_refused_where_workers_would_need_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(headrace_up, "find_spec", lambda _: None)
    wanted = UpSettings(engine=EngineKind.VLLM, model="m", data_dir=tmp_path / "data")
    with pytest.raises(Refused, match="not installed"):
        headrace_up._check_engine(wanted)
    headrace_up._check_engine(dataclasses.replace(wanted, workers=0))


def test_an_open_address_without_keys_is_refused_before_anything_starts(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    found = run(environ, tmp_path, "up", "--host", "0.0.0.0")
    assert found.returncode == 1
    assert "without keys" in found.stderr
    assert not (tmp_path / ".headrace").exists()


def test_a_port_in_use_is_refused_before_anything_starts(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        found = run(environ, tmp_path, "up", "--port", port)
    assert found.returncode == 1
    assert found.stderr.startswith(f"headrace: port {port} on 127.0.0.1 cannot be used")
    assert not (tmp_path / ".headrace" / "nats.json").exists()


@pytest.mark.slow
def test_a_key_that_stands_in_the_bucket_alone_is_asked_for_in_the_curl_line(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    async def scenario() -> None:
        async with up(tmp_path, environ) as system:
            assert "Authorization" not in system.line("curl")
            made = await asyncio.to_thread(
                *(run, environ, tmp_path, "keys", "create", "--tenant", "t"),
                *("--data-dir", system.data_dir),
            )
            assert made.returncode == 0, made.stderr
        async with up(tmp_path, environ) as system:
            assert ' -H "Authorization: Bearer KEY" ' in system.line("curl")

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_broker_that_is_away_is_status_2(tmp_path: Path, environ: dict[str, str]) -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    found = run(environ, tmp_path, "topology", "apply", "--nats-url", url)
    assert found.returncode == 2
    assert found.stderr.startswith("headrace: the broker is away")
    assert "Connect call failed" in found.stderr
