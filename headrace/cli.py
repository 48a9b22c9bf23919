"""The operators' command line. Exit status: 0, 1 (not found, refused), 2 (broker away, usage)."""

from dataclasses import dataclass
from typing import Annotated

import msgspec
import typer

from headrace import (
    deadletter_commands,
    queue_commands,
    settings,
    tenant_commands,
    topology,
    up,
)
from headrace.command_line import CommandLine
from headrace.datadir import DataDir, NothingRuns
from headrace.operate import OperatorSettings, operate, refuse
from headrace.up_settings import UpSettings

main = CommandLine(no_args_is_help=True, help="Serve LLMs over a durable queue.")
topology_commands = CommandLine(help="Streams, buckets and consumers on NATS.")
main.add_typer(topology_commands, name="topology", no_args_is_help=True)
main.add_typer(tenant_commands.tenant_app, name="tenants", no_args_is_help=True)
main.add_typer(tenant_commands.key_app, name="keys", no_args_is_help=True)


@dataclass(frozen=True, kw_only=True)
class PsSettings:
    """What `headrace ps` takes."""

    data_dir: settings.DataDir = settings.DATA_DIR
    as_json: settings.AsJson = False
    config: settings.Config = settings.NO_CONFIG


@dataclass(frozen=True, kw_only=True)
class ApplySettings(OperatorSettings):
    """What `headrace topology apply` takes."""

    replicas: Annotated[
        int | None,
        typer.Option(
            "--replicas",
            min=1,
            max=5,
            help="Copies of all. Without it 1, and what is there keeps as many as it has.",
            show_default=False,
        ),
    ] = None


def _up(wanted: UpSettings) -> None:
    """Start a whole system here, and keep it running. That is nats-server, a gateway (or ingress
    and streamers) and workers. Ctrl-C drains and stops them, a second one ends them at once."""
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
    """Make the streams and buckets what they should be. What is right stays untouched."""
    operate(_apply_to_broker(wanted))


async def _apply_to_broker(wanted: ApplySettings) -> None:
    async with wanted.connected() as bus:
        applied = await topology.apply(bus, replicas=wanted.replicas)
    if wanted.as_json:
        print(msgspec.json.encode({"applied": applied}).decode())
    else:
        print("\n".join(applied))


main.command("up")(settings.taking(UpSettings, _up))
main.command("ps")(settings.taking(PsSettings, _ps))
main.command("backlog")(settings.taking(queue_commands.BacklogSettings, queue_commands.backlog))
main.command("peek")(settings.taking(queue_commands.PeekSettings, queue_commands.peek))
main.command("cancel")(settings.taking(queue_commands.CancelSettings, queue_commands.cancel))
main.command("purge")(settings.taking(queue_commands.PurgeSettings, queue_commands.purge))
main.add_typer(deadletter_commands.commands, name="deadletters", no_args_is_help=True)
topology_commands.command("apply")(settings.taking(ApplySettings, _apply))

if __name__ == "__main__":
    main()
