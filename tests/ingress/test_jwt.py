"""Tokens: what is believed, and every known way of cheating, each a 401."""

import hashlib
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from headrace.tenant_settings import JwtSettings
from ingress.auth import Caller, Gate
from ingress.jwt import (
    VERIFIED_MAX,
    BadKeys,
    BadToken,
    UnknownKey,
    Verifier,
    read_jwks,
    static_keys,
)
from schemas.errors import InvalidApiKey
from tests.signing import EC_KEY, RSA_KEY, SECRET, by_hand, encoded, jwk, pem, private_pem, signed

NOW_S = int(time.time())
LATER_S = NOW_S + 86_400
"""Later than the end of any run of the tests: others show these tokens by the clock."""
CLAIMS = {"tenant": "acme", "exp": LATER_S, "aud": "headrace", "iss": "https://id.example"}
HS = JwtSettings(key=SECRET, audience="headrace", issuer="https://id.example")
RS = JwtSettings(key=pem(RSA_KEY), audience="headrace", issuer="https://id.example")
SET = JwtSettings(jwks_file="keys.json", audience="headrace", issuer="https://id.example")
JWKS = json.dumps({"keys": [jwk(RSA_KEY, "r1"), jwk(EC_KEY, "e1")]}).encode()
STRANGER = rsa.generate_private_key(public_exponent=65537, key_size=2048)


def verifier(settings: JwtSettings) -> Verifier:
    keys = read_jwks(JWKS, settings.used) if settings.jwks_file else static_keys(settings)
    return Verifier(settings, keys)


@pytest.mark.parametrize(
    ("settings", "token"),
    [
        (HS, signed(CLAIMS)),
        (HS, signed(CLAIMS, kid="any")),
        (HS, signed(CLAIMS | {"aud": ["other", "headrace"]})),
        (HS, signed(CLAIMS | {"nbf": NOW_S - 5, "iat": NOW_S - 5})),
        (HS, by_hand('{"alg":"HS256"}', json.dumps(CLAIMS))),
        (RS, signed(CLAIMS, RSA_KEY, "RS256")),
        (
            JwtSettings(key=pem(EC_KEY)),
            signed({"tenant": "acme", "exp": LATER_S}, EC_KEY, "ES256"),
        ),
        (SET, signed(CLAIMS, RSA_KEY, "RS256", kid="r1")),
        (SET, signed(CLAIMS, EC_KEY, "ES256", kid="e1")),
        (SET, signed(CLAIMS, RSA_KEY, "RS256")),
    ],
    ids=range(10),
)
def test_a_right_token_names_its_tenant(settings: JwtSettings, token: bytes) -> None:
    found = verifier(settings).verify(token, now_s=NOW_S)
    assert found.tenant == "acme"
    assert found.until_s > NOW_S


def changed(token: bytes, part: int, raw: bytes) -> bytes:
    parts = token.split(b".")
    parts[part] = raw
    return b".".join(parts)


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in CLAIMS.items() if key != name}


GOOD = signed(CLAIMS)
RSA_GOOD = signed(CLAIMS, RSA_KEY, "RS256")
TEXT = json.dumps(CLAIMS)
PAYLOAD = encoded(TEXT.encode())


def headed(header: dict[str, Any]) -> bytes:
    return by_hand(json.dumps(header), TEXT)


ATTACKS: dict[str, tuple[JwtSettings, bytes]] = {
    "none": (HS, encoded(b'{"alg":"none"}') + b"." + PAYLOAD + b"."),
    "none with a signature": (HS, encoded(b'{"alg":"none"}') + b"." + PAYLOAD + b".AA"),
    "None": (HS, headed({"alg": "None"})),
    "nOnE, for a public key": (RS, headed({"alg": "nOnE"})),
    "no algorithm": (HS, headed({})),
    "a list of algorithms": (HS, headed({"alg": ["HS256"]})),
    "algorithm null": (HS, headed({"alg": None})),
    "HS512": (HS, signed(CLAIMS, SECRET + SECRET, "HS512")),
    "hs256": (HS, headed({"alg": "hs256"})),
    "another algorithm's name": (HS, headed({"alg": "RS256"})),
    "RS/HS confusion": (RS, by_hand('{"alg":"HS256"}', TEXT, pem(RSA_KEY))),
    "RS/HS confusion, stripped": (RS, by_hand('{"alg":"HS256"}', TEXT, pem(RSA_KEY).strip())),
    "RS/HS confusion by a set": (SET, by_hand('{"alg":"HS256","kid":"r1"}', TEXT, pem(RSA_KEY))),
    "an EC token for an RSA key": (RS, signed(CLAIMS, EC_KEY, "ES256")),
    "PS256": (RS, signed(CLAIMS, RSA_KEY, "PS256")),
    "RS512": (RS, signed(CLAIMS, RSA_KEY, "RS512")),
    "an EC key by an RSA key's name": (SET, signed(CLAIMS, EC_KEY, "ES256", kid="r1")),
    "a stranger's key": (RS, signed(CLAIMS, STRANGER, "RS256")),
    "a stranger's secret": (HS, signed(CLAIMS, SECRET + "x")),
    "an empty secret": (HS, by_hand('{"alg":"HS256"}', TEXT, "")),
    "kid of a file": (SET, signed(CLAIMS, STRANGER, "RS256", kid="../../../dev/null")),
    "kid of SQL": (SET, signed(CLAIMS, STRANGER, "RS256", kid="x' UNION SELECT 'k")),
    "kid of a command": (SET, signed(CLAIMS, STRANGER, "RS256", kid="k|/bin/true")),
    "kid of a known key": (SET, signed(CLAIMS, STRANGER, "RS256", kid="r1")),
    "kid empty": (SET, signed(CLAIMS, RSA_KEY, "RS256", kid="")),
    "kid a number": (SET, by_hand('{"alg":"RS256","kid":1}', TEXT)),
    "kid null byte": (SET, signed(CLAIMS, RSA_KEY, "RS256", kid="r1\0")),
    "kid a number, right signature": (HS, headed({"alg": "HS256", "kid": 7})),
    "jwk": (SET, signed(CLAIMS, STRANGER, "RS256", jwk=jwk(STRANGER, "r1"), kid="r1")),
    "jwk with a right signature": (SET, signed(CLAIMS, RSA_KEY, "RS256", jwk=jwk(RSA_KEY, "r1"))),
    "jku": (SET, signed(CLAIMS, STRANGER, "RS256", jku="https://evil.example/k", kid="r1")),
    "jku with a right signature": (HS, signed(CLAIMS, jku="http://127.0.0.1:1/k")),
    "x5u": (HS, signed(CLAIMS, x5u="http://127.0.0.1:1/k")),
    "x5c": (HS, signed(CLAIMS, x5c=["MIIB"])),
    "crit": (HS, headed({"alg": "HS256", "crit": ["exp"], "exp": 1})),
    "b64 false": (HS, headed({"alg": "HS256", "b64": False})),
    "expired": (HS, signed(CLAIMS | {"exp": NOW_S - 1})),
    "expired long ago": (HS, signed(CLAIMS | {"exp": 0})),
    "no expiry": (HS, signed(without("exp"))),
    "expiry a text": (HS, by_hand('{"alg":"HS256"}', json.dumps(CLAIMS | {"exp": "9e9"}))),
    "expiry true": (HS, by_hand('{"alg":"HS256"}', json.dumps(CLAIMS | {"exp": True}))),
    "expiry Infinity": (HS, by_hand('{"alg":"HS256"}', json.dumps(CLAIMS | {"exp": 1e999}))),
    "expiry 1e999": (HS, by_hand('{"alg":"HS256"}', TEXT.replace(str(LATER_S), "1e999"))),
    "expiry NaN": (HS, by_hand('{"alg":"HS256"}', TEXT.replace(str(LATER_S), "NaN"))),
    "not yet": (HS, signed(CLAIMS | {"nbf": LATER_S - 600})),
    "issued in the future": (HS, signed(CLAIMS | {"iat": LATER_S - 600})),
    "another audience": (HS, signed(CLAIMS | {"aud": "other"})),
    "no audience": (HS, signed(without("aud"))),
    "audience empty": (HS, signed(CLAIMS | {"aud": []})),
    "an audience nobody named": (JwtSettings(key=SECRET), signed(CLAIMS)),
    "another issuer": (HS, signed(CLAIMS | {"iss": "https://evil.example"})),
    "no issuer": (HS, signed(without("iss"))),
    "the issuer with more behind": (HS, signed(CLAIMS | {"iss": "https://id.example.evil"})),
    "no tenant": (HS, signed(without("tenant"))),
    "tenant empty": (HS, signed(CLAIMS | {"tenant": ""})),
    "tenant a number": (HS, signed(CLAIMS | {"tenant": 1})),
    "tenant a list": (HS, signed(CLAIMS | {"tenant": ["acme"]})),
    "tenant with a null": (HS, signed(CLAIMS | {"tenant": "acme\0"})),
    "tenant with a line": (HS, signed(CLAIMS | {"tenant": "acme\n"})),
    "tenant of 10 kB": (HS, signed(CLAIMS | {"tenant": "a" * 5000})),
    "tenant a lone surrogate": (
        HS,
        by_hand('{"alg":"HS256"}', TEXT.replace('"acme"', '"\\ud800"')),
    ),
    "tenant twice": (HS, by_hand('{"alg":"HS256"}', TEXT[:-1] + ',"tenant":"other"}')),
    "expiry twice": (HS, by_hand('{"alg":"HS256"}', TEXT[:-1] + ',"exp":9999999999}')),
    "algorithm twice": (HS, by_hand('{"alg":"none","alg":"HS256"}', TEXT)),
    "huge": (HS, signed(CLAIMS | {"more": "x" * 20_000})),
    "deep": (HS, by_hand('{"alg":"HS256"}', TEXT[:-1] + ',"x":' + "[" * 3000 + "]" * 3000 + "}")),
    "a payload that is no object": (HS, by_hand('{"alg":"HS256"}', "[1]")),
    "a header that is no object": (HS, by_hand("[1]", TEXT)),
    "a payload that is no JSON": (HS, by_hand('{"alg":"HS256"}', "{")),
    "another payload": (HS, changed(GOOD, 1, encoded(TEXT.replace("acme", "other").encode()))),
    "no signature": (HS, changed(GOOD, 2, b"")),
    "half a signature": (HS, GOOD[:-10]),
    "another's signature": (HS, changed(GOOD, 2, signed(CLAIMS | {"n": 1}).split(b".")[2])),
    "an ES256 signature of zeros": (
        JwtSettings(key=pem(EC_KEY)),
        changed(signed({"tenant": "a", "exp": LATER_S}, EC_KEY, "ES256"), 2, encoded(bytes(64))),
    ),
    "an embedded null": (HS, GOOD[:30] + b"\0" + GOOD[30:]),
    "a null in the signature": (HS, GOOD[:-5] + b"\0" + GOOD[-5:]),
    "a null at the end": (HS, GOOD + b"\0"),
    "a blank": (HS, GOOD[:-5] + b" " + GOOD[-5:]),
    "padding": (HS, GOOD + b"="),
    "standard base64": (HS, GOOD[:-5] + b"+/" + GOOD[-5:]),
    "two dots more": (HS, GOOD + b".AA.AA"),
    "a dot before": (HS, b"." + GOOD),
    "two parts": (HS, b".".join(GOOD.split(b".")[:2])),
    "dots alone": (HS, b".."),
    "nothing": (HS, b""),
    "JSON serialisation": (
        HS,
        json.dumps({"payload": PAYLOAD.decode(), "signatures": []}).encode(),
    ),
    "a JWE": (HS, b".".join([encoded(b'{"alg":"dir","enc":"A128GCM"}'), b"", b"AA", b"AA", b"AA"])),
}


@pytest.mark.parametrize("kind", ATTACKS)
def test_a_token_that_cheats_is_401_and_no_part_of_it_is_said(kind: str) -> None:
    settings, token = ATTACKS[kind]
    gate = Gate([("x", hashlib.sha256(b"k").hexdigest())], verifier=verifier(settings))
    with pytest.raises(InvalidApiKey) as refused:
        gate.identify([(b"host", b"x"), (b"authorization", b"Bearer " + token)])
    assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")
    for part in token.split(b"."):
        assert len(part) < 8 or part.decode("latin-1") not in refused.value.message


def test_a_token_is_believed_until_it_expires_and_not_a_moment_longer() -> None:
    tokens = verifier(HS)
    assert tokens.verify(GOOD, now_s=NOW_S) == tokens.verify(GOOD, now_s=LATER_S - 1)
    with pytest.raises(BadToken):
        tokens.verify(GOOD, now_s=LATER_S)


def test_a_token_remembered_is_refused_once_its_key_is_taken_away() -> None:
    tokens = verifier(SET)
    token = signed(CLAIMS, RSA_KEY, "RS256", kid="r1")
    tokens.verify(token, now_s=NOW_S)
    tokens.use(read_jwks(json.dumps({"keys": [jwk(EC_KEY, "e1")]}).encode(), SET.used))
    with pytest.raises(UnknownKey):
        tokens.verify(token, now_s=NOW_S)


@pytest.mark.slow
def test_no_more_tokens_are_remembered_than_there_may_be() -> None:
    settings = JwtSettings(key=SECRET)
    tokens = Verifier(settings, static_keys(settings))
    for number in range(VERIFIED_MAX + 100):
        tokens.verify(signed({"tenant": "t", "exp": LATER_S, "n": number}), now_s=NOW_S)
    assert len(tokens._verified) == VERIFIED_MAX


@pytest.mark.parametrize(
    ("claim", "payload"),
    [
        ("org", {"org": "acme"}),
        ("https://id.example/tenant", {"https://id.example/tenant": "acme"}),
        ("org.id", {"org": {"id": "acme"}}),
    ],
)
def test_the_claim_that_names_the_tenant_is_configured(claim: str, payload: dict[str, Any]) -> None:
    settings = JwtSettings(key=SECRET, tenant_claim=claim)
    tokens = Verifier(settings, static_keys(settings))
    assert tokens.verify(signed(payload | {"exp": LATER_S}), now_s=NOW_S).tenant == "acme"


def test_a_token_of_a_tenant_that_nobody_wrote_down_is_admitted_or_refused_as_configured() -> None:
    headers = [(b"authorization", b"Bearer " + GOOD)]
    keys = [("x", hashlib.sha256(b"k").hexdigest())]
    assert Gate(keys, verifier=verifier(HS)).identify(headers) == Caller("acme")
    with pytest.raises(InvalidApiKey):
        Gate(keys, verifier=verifier(HS), unknown_tenants=False).identify(headers)


BAD_SETS: dict[str, Any] = {
    "no JSON": "{",
    "no keys": {},
    "keys no list": {"keys": 1},
    "a key without kind": {"keys": [{}]},
    "a weak RSA key": {
        "keys": [jwk(rsa.generate_private_key(public_exponent=65537, key_size=1024), "w")]
    },
}


@pytest.mark.parametrize("kind", BAD_SETS)
def test_a_set_that_cannot_be_used_is_refused(kind: str) -> None:
    content = BAD_SETS[kind]
    with pytest.raises(BadKeys):
        read_jwks((content if isinstance(content, str) else json.dumps(content)).encode(), SET.used)


def test_keys_that_are_for_something_else_are_left_out() -> None:
    others = [
        jwk(RSA_KEY, "encryption", use="enc"),
        jwk(RSA_KEY, "ps", alg="PS256"),
        jwk(ec.generate_private_key(ec.SECP384R1()), "p384"),
        {"kty": "oct", "kid": "o", "k": encoded(SECRET.encode()).decode()},
        {"kty": "OKP", "kid": "ed", "crv": "Ed25519", "x": "AA"},
        jwk(RSA_KEY, "signing only", key_ops=["sign"]),
    ]
    assert read_jwks(json.dumps({"keys": others}).encode(), SET.used) == ()


WRONG: dict[str, Callable[[], object]] = {
    "two sources": lambda: JwtSettings(key="k", jwks_file="f"),
    "no source": lambda: JwtSettings(),
    "plain HTTP": lambda: JwtSettings(jwks_url="http://id.example/keys"),
    "a file by URL": lambda: JwtSettings(jwks_url="file:///etc/passwd"),
    "a public key as a secret": lambda: JwtSettings(key=pem(RSA_KEY), algorithms=("HS256",)),
    "a key of two kinds": lambda: JwtSettings(key=pem(RSA_KEY), algorithms=("HS256", "RS256")),
    "a secret by URL": lambda: JwtSettings(jwks_url="https://x/k", algorithms=("HS256",)),
}


@pytest.mark.parametrize("kind", WRONG)
def test_settings_that_let_tokens_cheat_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        WRONG[kind]()


def test_a_key_that_its_algorithms_do_not_fit_is_refused() -> None:
    for settings in (
        JwtSettings(key=pem(RSA_KEY), algorithms=("ES256",)),
        JwtSettings(key=pem(EC_KEY), algorithms=("RS256",)),
        JwtSettings(key=SECRET, algorithms=("RS256",)),
        JwtSettings(key=pem(ec.generate_private_key(ec.SECP384R1()))),
        JwtSettings(key=private_pem(RSA_KEY)),
    ):
        with pytest.raises(BadKeys):
            static_keys(settings)


def test_a_short_secret_is_weak() -> None:
    short = JwtSettings(key="short")
    assert Verifier(short, static_keys(short)).weak
    assert not verifier(HS).weak
