"""Who may ask: keys by HEADRACE_API_KEY, and without keys this machine's own clients alone."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.pipeline.asking import CHAT, COMPLETIONS, chat, refusal
from tests.pipeline.conftest import Node, System, page
from tests.servers import free_port, node, wait_ready
from tests.waiting import wait_for

KEY = f"sk-{secrets.token_hex(16)}"


@pytest.fixture(scope="module")
def keyed(system: System, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A door with a key, in front of the same workers; its `admin_url` is its clients' too."""
    folder = tmp_path_factory.mktemp("keyed")
    port = free_port()
    process = node(
        system.door,
        *("--nats-url", system.nats_url, "--port", str(port)),
        log=folder / "gateway.log",
        env={"HEADRACE_API_KEY": KEY},
    )
    found = Node("keyed", process, f"http://127.0.0.1:{port}")
    try:
        wait_ready(process, found.admin_url)
        wait_for(
            lambda: "sim" in page(f"{found.admin_url}/readyz"),
            within_s=15,
            what="the model",
        )
        yield found
    finally:
        process.stop()


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_the_key_opens_every_endpoint(keyed: Node, scheme: str) -> None:
    headers = {"authorization": f"{scheme} {KEY}", "host": "api.example.com"}
    with httpx.Client(
        base_url=keyed.admin_url, headers=headers, follow_redirects=True, timeout=30
    ) as client:
        assert client.post(CHAT, json=chat(max_tokens=1)).status_code == 200
        body = {"model": "sim", "prompt": "x"}
        assert client.post(COMPLETIONS, json=body).status_code == 200
        assert client.get("/v1/models").status_code == 200


BAD: dict[str, list[tuple[bytes, bytes]]] = {
    "none": [],
    "another key": [(b"authorization", b"bearer x")],
    "a scheme alone": [(b"authorization", b"Bearer")],
    "another scheme": [(b"authorization", b"Basic " + KEY.encode())],
    "two headers": [(b"authorization", b"Bearer " + KEY.encode())] * 2,
    "10 kB": [(b"authorization", b"Bearer " + KEY.encode() * 300)],
    "non-ASCII": [(b"authorization", f"Bearer {KEY}é".encode())],
    "a part": [(b"authorization", b"Bearer " + KEY[:-1].encode())],
}


@pytest.mark.parametrize("kind", BAD)
def test_anything_else_is_401_in_the_apis_shape(keyed: Node, kind: str) -> None:
    with httpx.Client(base_url=keyed.admin_url, timeout=30) as client:
        for method, path in (("POST", CHAT), ("POST", COMPLETIONS), ("GET", "/v1/models")):
            body = chat() if method == "POST" else None
            answer = client.request(method, path, json=body, headers=BAD[kind])
            assert answer.status_code == 401
            assert refusal(answer)["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
            assert KEY[:12] not in answer.text


def test_no_log_line_holds_a_part_of_a_key(keyed: Node) -> None:
    with httpx.Client(base_url=keyed.admin_url, timeout=30) as client:
        for headers in BAD.values():
            client.post(CHAT, json=chat(), headers=headers)
    assert keyed.process.alive
    assert KEY[3:9] not in keyed.process.said()


def test_health_readiness_and_metrics_need_no_key(keyed: Node) -> None:
    for path in ("/healthz", "/readyz", "/metrics"):
        assert httpx.get(keyed.admin_url + path, timeout=30).status_code == 200


def test_an_unknown_key_is_refused_before_its_body_is_read(keyed: Node) -> None:
    with httpx.Client(base_url=keyed.admin_url, timeout=30) as client:
        answer = client.post(CHAT, content=b"{", headers={"authorization": "Bearer x"})
    assert answer.status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"host": "localhost", "origin": "http://localhost.evil.example"},
    ],
)
def test_without_keys_another_host_or_origin_is_403(
    system: System, headers: dict[str, str]
) -> None:
    with system.client() as client:
        for method, path in (("POST", CHAT), ("GET", "/v1/models")):
            answer = client.request(method, path, json=chat(), headers=headers)
            assert answer.status_code == 403
            assert refusal(answer)["code"] == "forbidden"


def test_without_keys_no_door_serves_more_than_this_machine(system: System, tmp_path: Path) -> None:
    args = ("--nats-url", system.nats_url, "--port", "0", "--host", "0.0.0.0")
    process = node(system.door, *args, log=tmp_path / "door.log")
    wait_for(lambda: not process.alive, within_s=60, what="its end")
    assert process.stop() != 0
    assert "HEADRACE_API_KEY" in process.said()
    assert "Traceback" not in process.said()
