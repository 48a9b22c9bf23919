"""What each process of `headrace up` is started with. Rule: it names the tiers and imports none."""

import hashlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

from headrace import devices
from headrace.addresses import Addresses, Place
from headrace.broker import Broker
from headrace.datadir import DataDir
from headrace.settings import EngineKind
from headrace.sockets import claim_port
from headrace.supervise import Command
from headrace.up_settings import UpSettings

NATS_GRACE_S: Final = 5.0
"""nats-server ends in milliseconds once its clients are gone."""


class Commands:
    """The commands of one `up`."""

    def __init__(
        self, wanted: UpSettings, data_dir: DataDir, broker: Broker | None, nats_url: str
    ) -> None:
        self._wanted = wanted
        self._data_dir = data_dir
        self._broker = broker
        self._nats_url = nats_url

    def fronts(self, addresses: Addresses) -> list[Command]:
        """Return what serves clients: a gateway, or the streamers and then the ingress."""
        if not self._wanted.split:
            [place] = addresses.doors
            flags = [*self._listen(place), *self._pings(), *self._origins(), *self._line()]
            return [self._tier("gateway", "gateway", "gateway", flags)]
        streamers = [
            self._tier(
                f"streamer-{number}",
                "streamer",
                "streamer",
                [
                    *(*self._listen(place), *self._pings(), *self._origins()),
                    *(*self._patience(), "--public-url", place.url),
                ],
            )
            for number, place in enumerate(addresses.streamers, start=1)
        ]
        ingress = [
            self._tier(
                f"ingress-{number}",
                "ingress",
                "ingress",
                [*self._listen(place), *self._origins(), *self._line()],
            )
            for number, place in enumerate(addresses.doors, start=1)
        ]
        return [*streamers, *ingress]

    def _listen(self, place: Place) -> list[str]:
        wanted = self._wanted
        chosen = wanted.connections_max
        return [
            *("--host", wanted.host, "--port", str(place.port)),
            *([] if chosen is None else ["--connections-max", str(chosen)]),
            *("--connections-per-address-max", str(wanted.connections_per_address_max)),
        ]

    def _pings(self) -> list[str]:
        return ["--websocket-ping-s", str(self._wanted.websocket_ping_s)]

    def _origins(self) -> list[str]:
        origins = sorted(self._wanted.cors_origins)
        return [part for origin in origins for part in ("--cors-origin", origin)]

    def _line(self) -> list[str]:
        wanted = self._wanted
        return [
            *("--queue-order", wanted.queue_order),
            *self._patience(),
            *("--limits-when-away", wanted.limits_when_away),
            *(["--log-prompts"] if wanted.log_prompts else []),
        ]

    def _patience(self) -> list[str]:
        return ["--queue-patience-s", str(self._wanted.queue_patience_s)]

    def publish_card(self) -> list[str]:
        """Return the command that publishes the model's card."""
        return [*_python("workers"), *self.engine_flags(), "--publish-card"]

    def nats(self, found: Broker) -> Command:
        """Return what runs the embedded broker."""
        return Command(
            name="nats",
            tier="nats",
            argv=lambda _: found.argv,
            environ=dict(os.environ),
            admin_port=lambda: found.monitor_port,
            grace_s=min(NATS_GRACE_S, self._wanted.grace_s),
            ready_path="/healthz",
            log=str(found.log),
        )

    def worker(self, number: int) -> Command:
        """Return what runs a worker; they count from 1."""
        wanted = self._wanted
        own = {}
        if wanted.engine is EngineKind.VLLM:
            own = devices.share(
                number - 1,
                workers=wanted.workers,
                per_worker=devices.ranks(wanted.engine_args.values),
                gpus=_visible_gpus(),
                cores=_usable_cores(),
                environ=os.environ,
            )
        flags = [*self.engine_flags(), "--orphan-s", str(wanted.orphan_s)]
        return self._tier(f"worker-{number}", "worker", "workers", flags, own)

    def _tier(
        self,
        name: str,
        tier: str,
        package: str,
        flags: Sequence[str],
        environ: dict[str, str] | None = None,
    ) -> Command:
        argv = [
            *_python(package),
            *flags,
            *("--name", self._peer_name(name)),
            *("--grace-s", str(self._wanted.grace_s)),
            *("--admin-host", "127.0.0.1", "--admin-port"),
        ]
        return Command(
            name=name,
            tier=tier,
            argv=lambda port: [*argv, str(port)],
            environ=self.environ() | (environ or {}),
            # A port of its own for each start: the last one may have gone to somebody else.
            admin_port=lambda: claim_port("127.0.0.1", 0),
            grace_s=self._wanted.grace_s,
        )

    def _peer_name(self, name: str) -> str:
        """Return a process's name among its peers: with a broker of others it needs more."""
        if self._broker is not None:
            return name
        mark = hashlib.sha256(str(self._data_dir.path).encode()).hexdigest()[:6]
        return f"{socket.gethostname()}-{mark}-{name}"

    def environ(self) -> dict[str, str]:
        """Return the environment of a tier."""
        # The URL holds the password, and a command line can be read by every user.
        environ = os.environ | {"HEADRACE_NATS_URL": self._nats_url}
        for name, path in (
            ("NATS_CREDS", self._wanted.nats_creds),
            ("NATS_CA", self._wanted.nats_ca),
            ("CONFIG", self._wanted.config.path),
        ):
            if path is not None:
                environ[f"HEADRACE_{name}"] = str(path.absolute())
        return environ

    def engine_flags(self) -> list[str]:
        """Return the flags that say which engine runs which model."""
        wanted = self._wanted
        flags = ["--engine", wanted.engine]
        if wanted.model is not None:
            flags += ["--model", wanted.model]
        if wanted.served_model_name is not None:
            flags += ["--served-model-name", wanted.served_model_name]
        return [*flags, "--engine-args", wanted.engine_args.text, "--sim", wanted.sim.text]


def _python(package: str) -> list[str]:
    # -P: a file in the working directory must not stand in for a tier.
    return [sys.executable, "-P", "-m", package]


def _visible_gpus() -> list[str]:
    named = os.environ.get(devices.GPUS)
    if named is not None:
        return [gpu.strip() for gpu in named.split(",") if gpu.strip()]
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    listed = subprocess.run(  # noqa: S603 - NVIDIA's own tool, no input of ours
        [tool, "--list-gpus"], capture_output=True, text=True, timeout=30, check=False
    ).stdout
    count = sum(line.startswith("GPU ") for line in listed.splitlines())
    return [str(number) for number in range(count)]


def _usable_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
