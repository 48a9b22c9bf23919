"""What `headrace up` was told is what each process that it starts is told."""

import dataclasses
from pathlib import Path

import pytest

from gateway.__main__ import GatewaySettings
from headrace.addresses import Addresses, Place
from headrace.commands import Commands
from headrace.datadir import DataDir
from headrace.settings import NodeSettings
from headrace.up_settings import UpSettings
from ingress.__main__ import IngressSettings
from streamer.__main__ import StreamerSettings
from workers.__main__ import WorkerSettings

TAKES: dict[str, type[NodeSettings]] = {
    "gateway": GatewaySettings,
    "ingress": IngressSettings,
    "streamer": StreamerSettings,
    "worker": WorkerSettings,
}
CHOSEN = UpSettings(
    model="m",
    served_model_name="n",
    cors_origin=["https://chat.example.com"],
    log_prompts=True,
    connections_max=100,
)
IN_THE_ENVIRONMENT = {"nats_url", "nats_creds", "nats_ca", "config"}


@pytest.mark.parametrize("split", [False, True])
def test_each_process_is_given_every_option_that_it_shares_with_up(
    tmp_path: Path, split: bool
) -> None:
    place = Place(port=1, url="http://127.0.0.1:1")
    wanted = dataclasses.replace(CHOSEN, split=split)
    commands = Commands(wanted, DataDir(tmp_path), None, "nats://x")
    addresses = Addresses((place,), (place,) if split else ())
    started = [*commands.fronts(addresses), commands.worker(1)]
    assert {each.tier for each in started} == (
        {"ingress", "streamer", "worker"} if split else {"gateway", "worker"}
    )
    own = {each.name for each in dataclasses.fields(UpSettings)} - IN_THE_ENVIRONMENT
    for command in started:
        shared = own & {each.name for each in dataclasses.fields(TAKES[command.tier])}
        options = {part for part in command.argv(2) if part.startswith("--")}
        assert {f"--{name.replace('_', '-')}" for name in shared} <= options, command.tier
