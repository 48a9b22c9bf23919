"""Tenants over the whole path: who comes in, what each may do, and what nobody else sees."""

import asyncio
import hashlib
import json
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from headrace.bus import Bus
from schemas.admit import Admit, Answer
from schemas.subjects import new_request_id
from tests.broker import with_bus
from tests.pipeline.asking import CHAT, chat, hook, refusal
from tests.pipeline.conftest import Mode, front, page
from tests.pipeline.house import KEYS, House, open_house
from tests.queue import asked, headrace
from tests.servers import START_S_MAX
from tests.signing import SECRET, signed
from tests.sse import events_of
from tests.talk import talking
from tests.waiting import until, wait_for

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def house(mode: Mode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with open_house(mode, tmp_path_factory.mktemp("house")) as found:
        yield found


def test_a_key_a_token_and_a_certificate_each_open_every_door(house: House) -> None:
    claims = {"tenant": "acme", "aud": "headrace", "exp": time.time() + 600}
    token = signed(claims).decode()
    for door in (0, 1):
        assert house.ask(KEYS["acme"], door).status_code == 200
        assert house.ask(token, door).status_code == 200
        with house.client(None, door) as client:
            own = client.post(CHAT, json=chat(max_tokens=1), headers={"x-client-dn": "CN=acme,O=A"})
            assert own.status_code == 200
            nobody = client.post(CHAT, json=chat(), headers={"x-client-dn": "O=A"})
            assert (nobody.status_code, refusal(nobody)["code"]) == (401, "invalid_api_key")
        for wrong in (None, "x", signed(claims | {"aud": "other"}).decode()):
            answer = house.ask(wrong, door)
            assert (answer.status_code, refusal(answer)["code"]) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"


def test_a_prompt_over_the_tenants_bound_is_400_naming_it(house: House) -> None:
    answer = house.ask(KEYS["small"], messages=chat("word " * 100)["messages"])
    assert answer.status_code == 400
    assert refusal(answer)["param"] == "messages"
    assert refusal(answer)["code"] == "token_limit_exceeded"
    assert house.ask(KEYS["acme"], messages=chat("word " * 100)["messages"]).status_code == 200


def test_an_answer_over_the_tenants_bound_is_400_and_is_cut_where_none_was_asked(
    house: House,
) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        with house.client(KEYS["small"]) as client:
            answer = client.post(CHAT, json=chat(**{name: 21}))
        assert (answer.status_code, refusal(answer)["param"]) == (400, name)
    cut = house.ask(KEYS["small"], max_tokens=None).json()
    assert cut["usage"]["completion_tokens"] <= 20


def test_a_model_that_a_tenant_may_not_ask_for_does_not_exist_for_it(house: House) -> None:
    answer = house.ask(KEYS["narrow"])
    assert (answer.status_code, refusal(answer)["code"]) == (404, "model_not_found")
    unknown = house.ask(KEYS["acme"], model="junk")
    assert refusal(answer)["message"] == refusal(unknown)["message"].replace("junk", "sim")
    with house.client(KEYS["narrow"]) as client:
        assert client.get("/v1/models").json()["data"] == []
    with house.client(KEYS["acme"]) as client:
        assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["sim"]


def test_a_tenants_deadline_holds_where_a_request_names_none(house: House) -> None:
    slow = hook("a", ttft_ms=2500)
    answer = house.ask(KEYS["quick"], sim=slow)
    assert (answer.status_code, refusal(answer)["code"]) == (504, "deadline_exceeded")
    with house.client(KEYS["quick"]) as client:
        named = client.post(CHAT, json=chat(sim=slow), headers={"x-request-timeout": "20"})
    assert named.status_code == 200


def test_another_tenants_request_is_not_found_by_any_means(house: House) -> None:
    with house.client(KEYS["acme"]) as owner, house.client(KEYS["small"]) as other:
        body = chat(sim=hook(*"abc", ttft_ms=0, itl_ms=60_000), stream=True)
        with owner.stream("POST", CHAT, json=body) as answer:
            request = answer.headers["x-request-id"]
            for node in house.front:
                cancel = f"{node.url}/v1/requests/{request}/cancel"
                assert other.post(cancel).status_code == 404
                assert other.get(f"{node.url}/v1/streams/{request}").status_code == 404
            assert (
                owner.post(f"{house.front[0].url}/v1/requests/{request}/cancel").status_code == 200
            )


def cached(house: House, tenant: str, prompt: str) -> int:
    usage = house.ask(KEYS[tenant], messages=chat(prompt)["messages"]).json()["usage"]
    found: int = usage["prompt_tokens_details"]["cached_tokens"]
    return found


def test_tenants_share_a_cached_prefix_only_where_both_allow_it(house: House) -> None:
    prompt = f"{secrets.token_hex(8)} " + "the same words again " * 40
    assert cached(house, "own", prompt) == 0
    assert cached(house, "own", prompt) > 0
    assert cached(house, "acme", prompt) == 0
    assert cached(house, "share-1", prompt) == 0
    assert cached(house, "share-2", prompt) > 0


def test_a_new_key_opens_every_door_and_a_revoked_one_none(house: House) -> None:
    key = house.create("fresh")
    wait_for(lambda: all(house.opens(key)), within_s=15, what="the key")
    assert headrace(house.nats_url, "keys", "revoke", house.key_id("fresh")).exit_code == 0
    wait_for(lambda: not any(house.opens(key)), within_s=15, what="its end")
    assert refusal(house.ask(key))["code"] == "invalid_api_key"
    assert asked(house.nats_url, "keys", "list", "--tenant", "fresh") == {"keys": []}


def test_a_body_that_ends_after_its_key_was_revoked_is_queued_nowhere(house: House) -> None:
    key = house.create("late")
    wait_for(lambda: all(house.opens(key)), within_s=15, what="the key")
    door = house.doors[0]
    tier = "ingress" if house.streamers else "gateway"
    body = json.dumps(chat(max_tokens=1)).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    host, port = door.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(head.encode() + body[:1])
        inflight = f"headrace_{tier}_requests_inflight"
        wait_for(lambda: door.metrics()[inflight] == 1, within_s=15, what="its reading")
        assert headrace(house.nats_url, "keys", "revoke", house.key_id("late")).exit_code == 0
        wait_for(lambda: not any(house.opens(key)), within_s=15, what="its end")
        client.sendall(body[1:])
        answer = client.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 401 "), answer
    assert b'"invalid_api_key"' in answer


def test_changed_terms_hold_at_every_door(house: House) -> None:
    key = house.create("changing")

    def codes(**more: Any) -> set[int]:
        return {house.ask(key, door, **more).status_code for door in (0, 1)}

    wait_for(lambda: codes(max_tokens=50) == {200}, within_s=15, what="the key")
    assert headrace(house.nats_url, "tenants", "set", "changing", "--tier", "tiny").exit_code == 0
    wait_for(lambda: codes(max_tokens=50) == {400}, within_s=15, what="the tier's bound")
    own = ("tenants", "set", "changing", "--max-output-tokens", "60")
    assert headrace(house.nats_url, *own).exit_code == 0
    wait_for(lambda: codes(max_tokens=50) == {200}, within_s=15, what="its own bound")
    assert headrace(house.nats_url, "tenants", "delete", "changing").exit_code == 0
    wait_for(lambda: codes() == {401}, within_s=15, what="its end")


def revoked_while_it_streams(
    house: House, tenant: str, *flags: str, tokens: int
) -> list[dict[str, Any]]:
    """Return the events of a stream whose key is revoked after its first token."""
    key = house.create(tenant)
    wait_for(lambda: all(house.opens(key)), within_s=15, what="the key")
    ids = {each["id"] for each in asked(house.nats_url, "keys", "list")["keys"]}
    mine = "key_" + hashlib.sha256(hashlib.sha256(key.encode()).digest()).hexdigest()[:16]
    assert mine in ids
    body = chat(sim=hook(*["a"] * tokens, itl_ms=300), stream=True)
    with house.client(key) as client, client.stream("POST", CHAT, json=body) as answer:
        lines = answer.iter_bytes()
        raw = next(lines)
        assert headrace(house.nats_url, "keys", "revoke", mine, *flags).exit_code == 0
        raw += b"".join(lines)
    return [event.json for event in events_of(raw) if event.data != "[DONE]"]


def test_a_revoked_keys_streams_finish_unless_its_tenant_says_otherwise(house: House) -> None:
    events = revoked_while_it_streams(house, "acme", tokens=8)
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    events = revoked_while_it_streams(house, "ender", tokens=100)
    assert events[-1]["error"]["code"] == "request_cancelled"


def test_an_operator_may_say_so_for_one_key_and_the_tenants_other_keys_go_on(house: House) -> None:
    body = chat(sim=hook(*"abcdefghij", itl_ms=500), stream=True)
    with (
        house.client(KEYS["acme"]) as other,
        other.stream("POST", CHAT, json=body) as answer,
    ):
        events = revoked_while_it_streams(house, "acme", "--end", tokens=100)
        assert events[-1]["error"]["code"] == "request_cancelled"
        assert b'"stop"' in answer.read()


def socket_end(house: House) -> str:
    return (house.streamers or house.doors)[0].url


def test_a_socket_opened_by_a_revoked_key_takes_no_further_request(house: House) -> None:
    key = house.create("socket")
    name = house.key_id("socket")

    async def run() -> None:
        headers = {"Authorization": f"Bearer {key}"}
        async with talking(socket_end(house), CHAT, additional_headers=headers) as talk:
            assert (await talk.ask("a", chat(sim=hook("a")))).text() == "a"
            await asyncio.to_thread(headrace, house.nats_url, "keys", "revoke", name)
            await until(lambda: not any(house.opens(key)))
            refused = await talk.ask("b", chat(sim=hook("b")))
            assert refused.error is not None
            assert refused.error["code"] == "invalid_api_key"

    wait_for(lambda: all(house.opens(key)), within_s=15, what="the key")
    asyncio.run(run())


def test_a_token_opens_a_socket(house: House) -> None:
    token = signed({"tenant": "acme", "aud": "headrace", "exp": time.time() + 600}).decode()

    async def run() -> None:
        async with talking(socket_end(house), CHAT) as talk:
            await talk.say({"type": "auth", "key": token})
            assert (await talk.ask("a", chat(sim=hook("a")))).text() == "a"

    asyncio.run(run())


def test_a_socket_whose_token_has_expired_takes_no_further_request(house: House) -> None:
    async def run(bus: Bus) -> Answer:
        body = msgspec.Raw(json.dumps(chat()).encode())
        question = Admit(
            tenant="acme",
            chat=True,
            body=body,
            request=new_request_id(),
            streamer="s",
            deadline_s=time.time() + 60,
            until_s=time.time() - 1,
        )
        data = await bus.request("ingress.admit", msgspec.json.encode(question), timeout_s=10)
        return msgspec.json.decode(data, type=Answer)

    answer = with_bus(house.nats_url, run)
    assert answer.refusal is not None
    assert answer.refusal.kind == "InvalidApiKey"


def test_a_proxys_certificate_opens_a_socket(house: House) -> None:
    async def run() -> None:
        headers = {"x-client-dn": "CN=small"}
        async with talking(socket_end(house), CHAT, additional_headers=headers) as talk:
            assert (await talk.ask("a", chat(sim=hook("a"), max_tokens=5))).text() == "a"
            refused = await talk.ask("b", chat(max_tokens=21))
            assert refused.error is not None
            assert refused.error["param"] == "max_tokens"

    asyncio.run(run())


def series(house: House) -> int:
    return sum(len(page(f"{node.admin_url}/metrics").splitlines()) for node in house.front)


def flood(house: House, body: Callable[[int], dict[str, Any]], count: int) -> set[int]:
    async def run() -> set[int]:
        room = asyncio.Semaphore(20)  # a pool's own queue takes the longer the more wait in it
        headers = {"authorization": f"Bearer {KEYS['acme']}", "content-type": "application/json"}
        async with httpx.AsyncClient(
            base_url=house.doors[0].url, timeout=60, headers=headers
        ) as client:

            async def status(number: int) -> int:
                async with room:
                    answer = await client.post(CHAT, content=json.dumps(body(number)))
                return answer.status_code

            return set(await asyncio.gather(*map(status, range(count))))

    return asyncio.run(run())


@pytest.mark.parametrize("count", [300, 3000])
def test_users_and_junk_models_make_no_metrics(house: House, count: int) -> None:
    before = series(house)
    assert flood(house, lambda n: chat(user=f"u{n}", model=f"m{n}"), count) == {404}
    assert flood(house, lambda n: chat(user=f"u{n}", max_tokens=1), count // 10) <= {200, 303}
    assert series(house) == before


def test_no_log_line_error_or_metric_holds_a_part_of_a_key(house: House) -> None:
    shown = [
        *KEYS.values(),
        signed({"tenant": "acme", "aud": "x", "exp": 1}).decode(),
        SECRET,
    ]
    wrong = [f"{key}x" for key in shown]
    texts = [house.ask(key).text for key in wrong]
    texts += [page(f"{node.admin_url}/metrics") for node in house.front]
    texts += [node.process.said() for node in house.front]
    for key in shown:
        for part in (key, key[-16:], key[8:24]):
            assert not any(part in text for text in texts)


def test_what_the_bucket_holds_names_no_key(house: House) -> None:
    listed = headrace(house.nats_url, "keys", "list", "--json").stdout
    for key in KEYS.values():
        assert key not in listed
        assert hashlib.sha256(key.encode()).hexdigest() not in listed


def test_the_tenants_are_listed_with_what_they_may_do(house: House) -> None:
    found = {each["name"]: each for each in asked(house.nats_url, "tenants", "list")["tenants"]}
    assert found["small"]["max_output_tokens"] == 20
    assert found["small"]["tier"] == "tiny"
    assert found["acme"]["max_output_tokens"] is None


@pytest.mark.parametrize(
    ("args", "status"),
    [
        (("keys", "revoke", "key_0"), 1),
        (("tenants", "delete", "nobody"), 1),
        (("tenants", "set", "a", "--tier", "gone"), 1),
        (("tenants", "set", "a", "--weight", "0"), 2),
        (("tenants", "set", "a", "--priority-class", "urgent"), 2),
        (("tenants", "set", "a", "--clear", "nonsense"), 2),
        (("keys", "create", "--tenant", ""), 2),
        (("keys", "create"), 2),
    ],
)
def test_what_an_operator_cannot_do_is_said(
    house: House, args: tuple[str, ...], status: int
) -> None:
    result = headrace(house.nats_url, *args)
    assert result.exit_code == status
    assert "Traceback" not in result.output


def test_an_unknown_setting_ends_the_start_and_is_named(house: House, tmp_path: Path) -> None:
    config = tmp_path / "wrong.toml"
    config.write_text('[[tenants]]\nname = "a"\nconcurent_requests = 5\n')
    module = "gateway" if not house.streamers else "ingress"
    node = front(module, house.nats_url, tmp_path, "--config", str(config))
    wait_for(lambda: not node.process.alive, within_s=START_S_MAX, what="its end")
    assert node.process.stop() == 2
    assert "'concurent_requests' in [[tenants]] is no setting" in node.process.said()
