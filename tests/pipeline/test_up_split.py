"""`headrace up --split` with the real tiers: a streamer dies, and the others carry on."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.pipeline.asking import CHAT, chat, collect, hook, stream
from tests.servers import Process, free_port, node
from tests.waiting import wait_for

pytestmark = pytest.mark.slow

PIECES = [f"<{number}>" for number in range(150)]


class Up:
    """A running `headrace up --split`."""

    def __init__(self, process: Process, data_dir: Path) -> None:
        self.process = process
        self._run_file = data_dir / "run.json"

    @property
    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._run_file.read_bytes())
        return found

    def pid(self, name: str) -> int:
        return int(self._of(name)["pid"])

    def ready(self, name: str) -> bool:
        return bool(self._of(name)["state"] == "ready")

    def _of(self, name: str) -> dict[str, Any]:
        [found] = [process for process in self.record["processes"] if process["name"] == name]
        return found

    def serves(self) -> bool:
        """Tell whether each ingress knows the model and both streamers."""
        pages = [self.admin(f"ingress-{n}", "/readyz").json() for n in (1, 2)]
        return all("sim" in page["models"] and page["streamers"] == 2 for page in pages)

    def admin(self, name: str, page: str) -> httpx.Response:
        with httpx.Client(timeout=30, verify=False) as client:
            return client.get(self._of(name)["admin_url"] + page)

    def client(self, *, follow: bool = True) -> httpx.Client:
        return httpx.Client(
            base_url=self.record["endpoint"], timeout=20, follow_redirects=follow, verify=False
        )


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("up-split")
    data_dir = folder / "data"
    flags = ("--split", "--ingress", "2", "--streamers", "2", "--port", str(free_port()))
    log = folder / "up.log"
    process = node("headrace.cli", "up", "--data-dir", str(data_dir), *flags, log=log)
    try:
        wait_for(
            lambda: not process.alive or "curl -N" in process.said(), within_s=120, what="serving"
        )
        found = Up(process, data_dir)
        wait_for(lambda: found.ready("worker-1"), within_s=60, what="the worker")
        wait_for(found.serves, within_s=30, what="the model and both streamers at each ingress")
        yield found
        assert process.stop(within_s=60) == 0, process.said()[-4000:]
    finally:
        process.terminate()
        with suppress(Exception):
            process.stop(within_s=30)


def test_the_endpoint_that_is_printed_serves_the_official_sdk(up: Up) -> None:
    for endpoint in up.record["endpoints"]:
        with openai.OpenAI(base_url=f"{endpoint}/v1", api_key="none", timeout=20) as sdk:
            messages: list[Any] = [{"role": "user", "content": "Hello"}]
            whole = sdk.chat.completions.create(model="sim", messages=messages, seed=3)
            with sdk.chat.completions.create(
                model="sim", messages=messages, seed=3, stream=True
            ) as parts:
                text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == whole.choices[0].message.content


def test_a_killed_streamer_is_brought_back_at_its_url_and_meanwhile_the_other_serves(
    up: Up,
) -> None:
    wait_for(up.serves, within_s=30, what="both streamers")
    texts: list[str] = []

    def read() -> None:
        with up.client() as client, suppress(httpx.TransportError):
            texts.append(stream(client, chat(sim=hook(*PIECES, itl_ms=100, ttft_ms=0))).text())

    def open_at(name: str) -> int:
        lines = up.admin(name, "/metrics").text.splitlines()
        [line] = [line for line in lines if line.startswith("headrace_streamer_replies_open ")]
        return int(float(line.split()[1]))

    def open_at_each() -> list[int]:
        return [open_at("streamer-1"), open_at("streamer-2")]

    # Who is sent where depends on what the streamers told last: at most a second ago.
    readers: list[threading.Thread] = []
    while 0 in open_at_each():
        readers.append(threading.Thread(target=read))
        readers[-1].start()
        wait_for(
            lambda: sum(open_at_each()) == len(readers),
            within_s=15,
            what=lambda: f"{len(readers)} streams",
        )
    _, others = open_at_each()
    victim = up.pid("streamer-1")
    os.kill(victim, signal.SIGKILL)
    deaf = {"ingress-1", "ingress-2"}

    def heard() -> bool:
        """Tell whether each ingress has heard of it, or it is back by now."""
        deaf.difference_update(name for name in [*deaf] if streamers_at(name) == 1)
        return not deaf or is_back()

    def streamers_at(name: str) -> int:
        return int(up.admin(name, "/readyz").json()["streamers"])

    def is_back() -> bool:
        return up.pid("streamer-1") != victim and up.ready("streamer-1")

    wait_for(heard, within_s=15, what="the news of a death")
    with up.client() as client:
        for _ in range(10):
            assert collect(client, chat(sim=hook("b")))["choices"][0]["finish_reason"] == "stop"
    for reader in readers:
        reader.join()
    assert texts == ["".join(PIECES)] * others, "the other streamer's client noticed something"
    wait_for(is_back, within_s=60, what="it is back")
    url = up.record["streamers"][0]

    def sent_there() -> bool:
        with up.client(follow=False) as client:
            answer = client.post(CHAT, json=chat(sim=hook("c")))
            location = answer.headers["location"]
        with httpx.Client(timeout=30, verify=False) as client:
            assert client.get(location).status_code == 200
        return bool(location.startswith(f"{url}/v1/replies/"))

    wait_for(sent_there, within_s=30, what="requests at the one that is back")
