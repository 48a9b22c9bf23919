"""Facts about where the tiers of `up` serve: ports that follow each other, and public URLs."""

import hashlib
from typing import Any

import pytest

from headrace.addresses import Refused, check, choose
from headrace.settings import ApiKey, ApiKeys, ConfigFile
from headrace.sockets import claim_port, listen
from headrace.up_settings import UpSettings

KEYED = ConfigFile(keys=ApiKeys((ApiKey("t", hashlib.sha256(b"k").hexdigest()),)))


def wanted(**values: Any) -> UpSettings:
    return UpSettings(**{"port": 0} | values)


def test_without_split_there_is_one_door_and_no_streamer() -> None:
    found = choose(wanted())
    [door] = found.doors
    assert found.endpoints == (f"http://127.0.0.1:{door.port}",)
    assert found.streamers == ()


def test_ports_are_the_one_asked_for_and_what_follows_free() -> None:
    port = claim_port("127.0.0.1", 0)
    with listen("127.0.0.1", port + 1):
        found = choose(wanted(split=True, port=port, ingress=2, streamers=2))
    ports = [place.port for place in (*found.doors, *found.streamers)]
    assert ports[0] == port
    assert port + 1 not in ports
    assert ports == sorted(set(ports))
    assert found.websockets == tuple(
        f"ws://127.0.0.1:{place.port}/v1/chat/completions" for place in found.streamers
    )


def test_streamers_are_reached_at_their_own_loopback_address_unless_told_otherwise() -> None:
    found = choose(wanted(split=True, streamers=2))
    assert [place.url for place in found.streamers] == [
        f"http://127.0.0.1:{place.port}" for place in found.streamers
    ]
    template = "https://llm.example/s{number}/{port}/"
    found = choose(wanted(split=True, streamers=2, public_url=template))
    assert [place.url for place in found.streamers] == [
        f"https://llm.example/s{number}/{place.port}"
        for number, place in enumerate(found.streamers, start=1)
    ]
    assert found.websockets[0].startswith("wss://llm.example/s1/")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"ingress": 2}, "--split"),
        ({"streamers": 1}, "--split"),
        ({"split": True, "host": "0.0.0.0"}, "without keys"),
        ({"public_url": "http://h:{port}"}, "--split"),
        ({"split": True, "host": "0.0.0.0", "config": KEYED}, "--public-url"),
        ({"split": True, "streamers": 2, "public_url": "http://one"}, "{port}"),
        ({"split": True, "public_url": "http://{host}"}, "{port}"),
        ({"split": True, "public_url": "http://{port"}, "{port}"),
        ({"split": True, "public_url": "http://{0}"}, "{port}"),
        ({"split": True, "public_url": "http://{port.x}"}, "{port}"),
        ({"split": True, "public_url": "llm.example"}, "URL"),
    ],
)
def test_addresses_that_would_not_do_are_refused(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(Refused, match=reason.replace("{", r"\{")):
        check(wanted(**values))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"split": True, "ingress": 2, "streamers": 2},
        {"split": True, "public_url": "http://one"},
        {"split": True, "host": "0.0.0.0", "config": KEYED, "public_url": "http://h:{port}"},
    ],
)
def test_addresses_that_do_are_not(values: dict[str, Any]) -> None:
    check(wanted(**values))
