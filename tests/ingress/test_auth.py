"""Whose request this is: one bearer key, known by its digest; without keys, this machine alone."""

import hashlib
import time
import traceback

import pytest

from ingress.auth import KEY_BYTES_MAX, Caller, Gate, is_loopback
from schemas.errors import Forbidden, InvalidApiKey
from schemas.tenant import Entry, Key

KEY = b"sk-secret-key"
OTHER = b"sk-other-key"
GATE = Gate([("acme", hashlib.sha256(KEY).hexdigest()), ("b", hashlib.sha256(OTHER).hexdigest())])
KEYLESS = Gate([])


def sent(*values: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"api.example.com"), *((b"authorization", value) for value in values)]


@pytest.mark.parametrize(
    "value", [b"Bearer " + KEY, b"bearer " + KEY, b"BEARER " + KEY, b"Bearer   " + KEY + b" "]
)
def test_a_known_key_names_its_tenant(value: bytes) -> None:
    assert GATE.identify(sent(value)) == Caller("acme")


def test_each_key_names_its_own_tenant() -> None:
    assert GATE.identify(sent(b"Bearer " + OTHER)) == Caller("b")
    assert GATE.identify_key(KEY) == Caller("acme")


BAD: dict[str, tuple[bytes, ...]] = {
    "no header": (),
    "an unknown key": (b"Bearer x",),
    "a lower-case scheme and an unknown key": (b"bearer x",),
    "a scheme alone": (b"Bearer",),
    "a scheme and a blank": (b"Bearer ",),
    "an empty header": (b"",),
    "the key alone": (KEY,),
    "another scheme": (b"Basic " + KEY,),
    "a colon": (b"Bearer: " + KEY,),
    "a tab for the blank": (b"Bearer\t" + KEY,),
    "two equal headers": (b"Bearer " + KEY, b"Bearer " + KEY),
    "a good and a bad header": (b"Bearer " + KEY, b"Bearer x"),
    "two keys in one": (b"Bearer " + KEY + b", Bearer " + KEY,),
    "10 kB": (b"Bearer " + b"k" * 10_000,),
    "a key with more behind": (b"Bearer " + KEY + b"x",),
    "a part of a key": (b"Bearer " + KEY[:-1],),
    "non-ASCII": ("Bearer schlüssel".encode(),),
    "Latin-1": (b"Bearer \xe9",),
    "a NUL": (b"Bearer " + KEY + b"\0",),
    "the digest itself": (b"Bearer " + hashlib.sha256(KEY).hexdigest().encode(),),
}


@pytest.mark.parametrize("kind", BAD)
def test_anything_else_is_401_and_tells_no_part_of_the_key(kind: str) -> None:
    with pytest.raises(InvalidApiKey) as refused:
        GATE.identify(sent(*BAD[kind]))
    assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")
    said = refused.value.message + "".join(traceback.format_exception_only(refused.value))
    for value in BAD[kind]:
        for word in value.replace(b"Bearer", b"").split():
            if len(word) > 1 and word.lower() not in (b"bearer", b"basic"):
                assert word.decode("latin-1") not in said


def test_a_key_of_the_longest_length_is_known() -> None:
    key = b"k" * KEY_BYTES_MAX
    gate = Gate([("long", hashlib.sha256(key).hexdigest())])
    assert gate.identify(sent(b"Bearer " + key)) == Caller("long")
    with pytest.raises(InvalidApiKey):
        gate.identify(sent(b"Bearer " + key + b"k"))


def test_a_digest_in_capitals_is_the_same_key() -> None:
    gate = Gate([("acme", hashlib.sha256(KEY).hexdigest().upper())])
    assert gate.identify(sent(b"Bearer " + KEY)) == Caller("acme")


def test_with_keys_host_and_origin_do_not_matter() -> None:
    headers = [*sent(b"Bearer " + KEY), (b"origin", b"https://evil.example")]
    assert GATE.identify(headers) == Caller("acme")


LOCAL_HOSTS = [
    *(b"localhost", b"localhost:8000", b"127.0.0.1:8000", b"127.1.2.3", b"[::1]:8000", b"[::1]"),
    b"LOCALHOST",
]
FOREIGN_HOSTS = [
    *(b"evil.example", b"evil.example:8000", b"localhost.evil.example", b"127.0.0.1.evil.example"),
    *(b"10.0.0.1", b"0.0.0.0", b"[::2]", b"", b"127.0.0.1@evil.example", b"[::1", b"\xff"),
    *(b"evil.example#localhost", b"evil.example/localhost"),
]


@pytest.mark.parametrize("host", LOCAL_HOSTS)
def test_without_keys_this_machines_clients_are_the_default_tenant(host: bytes) -> None:
    assert KEYLESS.keyless
    assert KEYLESS.identify([(b"host", host)]) == Caller("default")
    origin = b"http://" + host
    assert KEYLESS.identify([(b"host", host), (b"origin", origin)]) == Caller("default")


@pytest.mark.parametrize("host", FOREIGN_HOSTS)
def test_without_keys_another_host_name_is_refused(host: bytes) -> None:
    with pytest.raises(Forbidden) as refused:
        KEYLESS.identify([(b"host", host)])
    assert refused.value.status == 403


@pytest.mark.parametrize(
    "origin",
    [
        *(b"https://evil.example", b"null", b"", b"http://localhost.evil.example", b"file://"),
        *(b"http://localhost@evil.example", b"http://evil.example:8000", b"http://[::1"),
    ],
)
def test_without_keys_a_page_of_another_origin_is_refused(origin: bytes) -> None:
    with pytest.raises(Forbidden):
        KEYLESS.identify([(b"host", b"localhost:8000"), (b"origin", origin)])


def test_without_keys_a_key_is_not_looked_at() -> None:
    headers = [(b"host", b"localhost"), (b"authorization", b"Bearer any")]
    assert KEYLESS.identify(headers) == Caller("default")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_addresses_are_this_machines(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com", "", "localhost.com"])
def test_other_addresses_are_not(host: str) -> None:
    assert not is_loopback(host)


def test_who_was_known_once_is_refused_when_the_token_has_expired_or_the_key_is_revoked() -> None:
    gate = Gate([("acme", hashlib.sha256(KEY).hexdigest())])
    caller = gate.identify_key(KEY)
    gate.check(caller)
    gate.check(Caller("acme", until_s=time.time() + 60))
    with pytest.raises(InvalidApiKey):
        gate.check(Caller("acme", until_s=time.time() - 1))
    key = Key(tenant="acme", sha256=hashlib.sha256(KEY).hexdigest())
    gate.directory.take("key", key.id, Entry(value=key, gone_s=1.0))
    for act in (lambda: gate.check(caller), lambda: gate.identify_key(KEY)):
        with pytest.raises(InvalidApiKey):
            act()
