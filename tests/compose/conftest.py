"""compose's system without containers: its configuration files, its processes, on loopback.

What differs is what a template or a flag can change: addresses, ports and folders. The streamers
stand at 127.0.0.2 and 127.0.0.3, each with its path behind nginx.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.compose import files, programs
from tests.compose.files import SECRETS, environment
from tests.servers import ROOT, START_S_MAX, Process, answers, free_port, node, wait_ready
from tests.waiting import wait_for

KEY = SECRETS["HEADRACE_API_KEY"]
STREAMERS = ("127.0.0.2", "127.0.0.3")
PATIENCE_S = 60.0


@dataclass
class Composed:
    """Everything that runs. `ingress` may be stopped and started again by a test."""

    folder: Path
    ports: dict[str, int] = field(default_factory=dict)
    processes: dict[str, Process] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports['nginx']}"

    def port(self, name: str) -> int:
        return self.ports.setdefault(name, free_port())

    def client(self, key: str | None = KEY) -> httpx.Client:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE_S)

    def start_nats(self) -> None:
        environ = environment("nats")
        (store := self.folder / "data").mkdir()
        environ["NATS_STORE_DIR"] = environ["NATS_STORE_DIR"].replace("/data", str(store))
        monitor = self.port("monitor")
        address = ("-a", "127.0.0.1", "-p", str(self.port("nats")), "-m", str(monitor))
        self.processes["nats"] = Process(
            [programs.nats_server(), "--config", str(files.NATS_CONF), *address],
            log=self.folder / "nats.log",
            env=environ,
        )
        self._wait(self.processes["nats"], f"http://127.0.0.1:{monitor}/healthz")

    def environ(self, service: str) -> dict[str, str]:
        """Return a tier's environment with addresses of this machine."""
        found = environment(service)
        url = found["HEADRACE_NATS_URL"]
        found["HEADRACE_NATS_URL"] = url.replace("@nats:4222", f"@127.0.0.1:{self.port('nats')}")
        return found | {"HEADRACE_ADMIN_HOST": "127.0.0.1", "HEADRACE_GRACE_S": "2"}

    def apply_topology(self) -> None:
        """Run the init service to its end."""
        command = files.services()["topology"]["command"]
        result = subprocess.run(
            [sys.executable, "-m", "headrace.cli", *command[1:]],
            capture_output=True,
            text=True,
            timeout=START_S_MAX,
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | self.environ("topology"),
        )
        assert result.returncode == 0, result.stdout + result.stderr
        assert "REQUESTS" in result.stdout

    def start(self, name: str, *args: str, **own: str) -> None:
        """Start the tier `name` begins with; return once it is ready."""
        service = name.partition("-")[0]
        module = "workers" if service == "worker" else service
        port = str(self.port(f"{name} admin"))
        env = self.environ(service) | {"HEADRACE_ADMIN_PORT": port} | own
        process = node(module, *args, log=self.folder / f"{name}.log", env=env)
        self.processes[name] = process
        wait_ready(process, f"http://127.0.0.1:{port}")

    def start_ingress(self) -> None:
        port = str(self.port("ingress"))
        self.start("ingress", HEADRACE_HOST="127.0.0.1", HEADRACE_PORT=port)

    def start_nginx(self) -> None:
        ports: Mapping[str, int] = {name: self.port(name) for name in ("ingress", "streamer")}
        _, *args = files.render_nginx(
            self.folder,
            NGINX_LISTEN=f"127.0.0.1:{self.port('nginx')}",
            NGINX_INGRESS_ADDRESS=f"127.0.0.1:{ports['ingress']}",
            NGINX_STREAMER_ADDRESS=f"{STREAMERS[0]}:{ports['streamer']}",
            NGINX_STREAMER_NAME=r"127[.]0[.]0[.][2-4]",
            NGINX_STREAMER_PORT=str(ports["streamer"]),
        )
        if os.geteuid() == 0:  # else its children are nobody's, who may not enter our folder
            args[-1] += " user root;"
        log = self.folder / "nginx.log"
        self.processes["nginx"] = Process([programs.nginx(), *args], log=log)
        self._wait(self.processes["nginx"], f"{self.url}/readyz")

    def _wait(self, process: Process, url: str) -> None:
        def there() -> bool:
            assert process.alive, process.said()
            return answers(url)

        wait_for(there, within_s=START_S_MAX, what=url)


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Composed]:
    programs.nginx()
    system = Composed(tmp_path_factory.mktemp("compose"))
    with ExitStack() as cleanup:

        def end() -> None:
            for process in reversed(system.processes.values()):
                process.terminate()
            for process in reversed(system.processes.values()):
                process.stop()

        cleanup.callback(end)
        system.start_nats()
        system.apply_topology()
        port = str(system.port("streamer"))
        for number, host in enumerate(STREAMERS):
            path = f"/streams/{host}"
            own = {"HEADRACE_HOST": host, "HEADRACE_PORT": port}
            system.start(f"streamer-{number}", "--public-url", path, **own)
        system.start("worker")
        system.start_ingress()
        system.start_nginx()
        with system.client() as client:
            wait_for(
                lambda: "sim" in client.get("/v1/models").text,
                within_s=START_S_MAX,
                what="the model",
            )
        yield system
        for name, process in system.processes.items():
            assert process.alive, f"{name} ended:\n{process.said()[-4000:]}"
