"""The operators' command line. Exit status: 0, 1 (not found, refused), 2 (broker away, usage)."""

import asyncio
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import typer

from headrace import settings, topology, up
from headrace.bus import BrokerAway, BrokerRefused, BusSettings, connection
from headrace.datadir import DataDir, NothingRuns
from headrace.topology import Sizes

CONNECT_TIMEOUT_S = 5.0

main = typer.Typer(**settings.PLAIN, no_args_is_help=True, help="Serve LLMs over a durable queue.")
topology_commands = typer.Typer(**settings.PLAIN, help="Streams, buckets and consumers on NATS.")
main.add_typer(topology_commands, name="topology", no_args_is_help=True)


@dataclass(frozen=True, kw_only=True)
class PsSettings:
    """What `headrace ps` takes."""

    data_dir: settings.DataDir = settings.DATA_DIR
    as_json: settings.AsJson = False
    config: settings.Config = settings.NO_CONFIG


@dataclass(frozen=True, kw_only=True)
class OperatorSettings:
    """What every operator command that talks to the broker takes."""

    nats_url: settings.OptionalNatsUrl = None
    nats_creds: settings.NatsCreds = None
    nats_ca: settings.NatsCa = None
    data_dir: settings.OptionalDataDir = None
    as_json: settings.AsJson = False
    config: settings.Config = settings.NO_CONFIG

    @property
    def bus(self) -> BusSettings:
        """Where the broker is. Raises NothingRuns."""
        return BusSettings(
            url=find_nats_url(self.nats_url, self.data_dir),
            creds=None if self.nats_creds is None else str(self.nats_creds),
            ca=None if self.nats_ca is None else str(self.nats_ca),
        )


@dataclass(frozen=True, kw_only=True)
class ApplySettings(OperatorSettings):
    """What `headrace topology apply` takes."""

    replicas: Annotated[int, typer.Option("--replicas", min=1, max=5, help="Copies of all.")] = 1


def find_nats_url(nats_url: str | None, data_dir: Path | None) -> str:
    """Return where the broker is: as named, else that of the data dir. Raises NothingRuns."""
    if nats_url is not None:
        return nats_url
    return DataDir(data_dir or settings.DATA_DIR).running().nats_url


def refuse(reason: object, *, status: int = 1) -> NoReturn:
    """End the command with one line on stderr."""
    print(f"headrace: {reason}", file=sys.stderr)
    raise typer.Exit(status)


def operate(work: Coroutine[Any, Any, None]) -> None:
    """Run a command that talks to the broker; say why when it cannot."""
    try:
        asyncio.run(work)
    except NothingRuns as error:
        refuse(error)
    except BrokerRefused as error:
        refuse(f"the broker refused: {error}")
    except BrokerAway as error:
        refuse(f"the broker is away: {error}", status=2)


def _up(wanted: settings.UpSettings) -> None:
    """Start nats-server, a gateway (or ingress and streamers) and workers; keep them running."""
    raise typer.Exit(up.run(wanted))


def _ps(wanted: PsSettings) -> None:
    """List the processes that `headrace up` keeps running."""
    try:
        record = DataDir(wanted.data_dir).running()
    except NothingRuns as error:
        refuse(error)
    if wanted.as_json:
        print(up.processes_json(record))
        return
    print(f"{'NAME':<12} {'TIER':<8} {'PID':>8} {'STATE':<9} ADMIN URL")
    for process in record.processes:
        print(
            f"{process.name:<12} {process.tier:<8} {process.pid:>8} {process.state:<9}"
            f" {process.admin_url}"
        )
    for endpoint in record.endpoints or (record.endpoint,):
        print(f"endpoint: {endpoint}")
    for url in record.streamers:
        print(f"streamer: {url}")


def _apply(wanted: ApplySettings) -> None:
    """Make the streams and buckets what they should be; what is right stays untouched."""
    operate(_apply_to_broker(wanted))


async def _apply_to_broker(wanted: ApplySettings) -> None:
    async with connection(wanted.bus, name="operator", timeout_s=CONNECT_TIMEOUT_S) as bus:
        applied = await topology.apply(bus, Sizes(replicas=wanted.replicas))
    if wanted.as_json:
        print(msgspec.json.encode({"applied": applied}).decode())
    else:
        print("\n".join(applied))


main.command("up")(settings.taking(settings.UpSettings, _up))
main.command("ps")(settings.taking(PsSettings, _ps))
topology_commands.command("apply")(settings.taking(ApplySettings, _apply))

if __name__ == "__main__":
    main()
