"""Three nats-servers on loopback that are one cluster; each can be killed and started again."""

import shutil
import sys
from pathlib import Path

from headrace.bus import BrokerAway, BrokerRefused, Bus
from tests.broker import with_bus
from tests.servers import Process, free_port
from tests.waiting import wait_for

SIZE = 3
START_S_MAX = 30.0


class NatsCluster:
    """A cluster with JetStream. `url` names all of it, with commas between."""

    def __init__(self, folder: Path) -> None:
        self.ports = [free_port() for _ in range(SIZE)]
        self.url = ",".join(f"nats://127.0.0.1:{port}" for port in self.ports)
        self._folder = folder
        self._routes = [free_port() for _ in range(SIZE)]
        self._processes: dict[int, Process] = {}

    def start(self) -> None:
        """Start all and wait until they have a leader."""
        for number in range(SIZE):
            self.start_one(number)
        wait_for(self._serves, within_s=START_S_MAX, what="a leader of the cluster")

    def start_one(self, number: int) -> None:
        """Start one of them, `n0`, `n1` or `n2`."""
        beside = str(Path(sys.executable).parent)
        binary = shutil.which("nats-server") or shutil.which("nats-server", path=beside)
        assert binary, "nats-server is neither on PATH nor beside this Python"
        routes = ",".join(f"nats://127.0.0.1:{port}" for port in self._routes)
        command = [
            *(binary, "-a", "127.0.0.1", "-p", str(self.ports[number]), "-n", f"n{number}"),
            *("-js", "-sd", str(self._folder / f"store-{number}")),
            *("--cluster_name", "three", "--routes", routes),
            *("--cluster", f"nats://127.0.0.1:{self._routes[number]}"),
        ]
        self._processes[number] = Process(command, log=self._folder / f"n{number}.log")

    def kill(self, name: str) -> int:
        """End one of them with SIGKILL; return its number."""
        number = int(name.removeprefix("n"))
        self._processes.pop(number).kill()
        return number

    def stop(self) -> None:
        """End all; their stores stay."""
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            process.stop()
        self._processes.clear()

    def _serves(self) -> bool:
        async def ask(bus: Bus) -> None:
            await bus.api("STREAM.CREATE.probe", {"name": "probe", "num_replicas": SIZE})
            await bus.api("STREAM.DELETE.probe")

        for process in self._processes.values():
            assert process.alive, process.said()
        try:
            with_bus(self.url, ask)
        except (BrokerAway, BrokerRefused):
            return False
        return True
