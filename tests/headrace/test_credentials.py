"""A broker that asks who comes: by credentials, over TLS; and what is said where that fails."""

import asyncio
import base64
import json
import secrets
from collections.abc import Callable, Coroutine, Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

import nkeys
import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from headrace.bus import BusSettings, connection
from tests.queue import headrace
from tests.servers import NatsServer, free_port, node
from tests.waiting import until, wait_for


class Guarded(NamedTuple):
    """A server that takes one user, over TLS, and the files that say so."""

    server: NatsServer
    creds: Path
    ca: Path

    @property
    def url(self) -> str:
        return self.server.url


def pair(kind: int) -> Any:
    return nkeys.from_seed(nkeys.encode_seed(secrets.token_bytes(32), kind))


def encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def signed(issuer: Any, subject: Any, **nats: object) -> str:
    """Return a token of NATS' JWT authentication, version 2."""
    claims = {
        "jti": secrets.token_hex(16),
        "iat": 1,
        "iss": issuer.public_key.decode(),
        "sub": subject.public_key.decode(),
        "nats": {"version": 2, **nats},
    }
    parts = ({"typ": "JWT", "alg": "ed25519-nkey"}, claims)
    text = ".".join(encoded(json.dumps(part).encode()) for part in parts)
    return f"{text}.{encoded(issuer.sign(text.encode()))}"


def certificate(folder: Path) -> tuple[Path, Path]:
    """Write a certificate for 127.0.0.1 that is its own authority, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "nats")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "ca.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return folder / "ca.pem", folder / "key.pem"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    operator, user = pair(nkeys.PREFIX_BYTE_OPERATOR), pair(nkeys.PREFIX_BYTE_USER)
    account, system = pair(nkeys.PREFIX_BYTE_ACCOUNT), pair(nkeys.PREFIX_BYTE_ACCOUNT)
    core = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1)
    stored = dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), -1)
    limits = core | {"wildcards": True}
    known = {
        account.public_key.decode(): signed(
            operator, account, type="account", limits=limits | stored
        ),
        system.public_key.decode(): signed(operator, system, type="account", limits=limits),
    }
    ca, key = certificate(folder)
    config = f"""
        tls {{ cert_file: "{ca}", key_file: "{key}" }}
        operator: {signed(operator, operator, type="operator")}
        system_account: {system.public_key.decode()}
        resolver: MEMORY
        resolver_preload: {json.dumps(known)}
    """
    creds = folder / "user.creds"
    token = signed(account, user, type="user", subs=-1, data=-1, payload=-1)
    creds.write_text(
        f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
    )
    server = NatsServer(folder, config=config)
    server.start()
    yield Guarded(server, creds, ca)
    server.stop()


def test_a_credentials_file_and_an_authority_open_a_broker_that_asks_for_both(
    guarded: Guarded,
) -> None:
    files = ("--nats-creds", str(guarded.creds), "--nats-ca", str(guarded.ca))
    made = headrace(guarded.url, "topology", "apply", *files)
    assert made.exit_code == 0, made.stderr
    assert headrace(guarded.url, "backlog", *files).exit_code == 0


@pytest.mark.parametrize("runs", [asyncio.run, uvloop.run])
def test_a_connection_by_credentials_over_tls_outlasts_a_restart(
    guarded: Guarded, runs: Callable[[Coroutine[Any, Any, None]], None]
) -> None:
    settings = BusSettings(guarded.url, creds=str(guarded.creds), ca=str(guarded.ca))

    async def scenario() -> None:
        async with connection(settings, name="t", timeout_s=30) as bus:
            await asyncio.to_thread(guarded.server.stop)
            await until(lambda: not bus.connected)
            await asyncio.to_thread(guarded.server.start)
            await until(lambda: bus.connected, within_s=30)
            await bus.api("INFO")

    runs(scenario())


@pytest.mark.parametrize("flag", ["--nats-ca", "--nats-creds"])
def test_a_file_that_is_not_there_is_a_usage_error(flag: str, tmp_path: Path) -> None:
    result = headrace("nats://127.0.0.1:1", "backlog", flag, str(tmp_path / "none.pem"))
    assert result.exit_code == 2
    assert "none.pem" in result.stderr


def test_a_file_that_is_no_certificate_is_said_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("none")
    result = headrace("nats://127.0.0.1:1", "backlog", "--nats-ca", str(tmp_path / "ca.pem"))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize("url", ["", ",", "nats://[::1"])
def test_what_is_no_url_is_said_in_a_line_at_once(url: str) -> None:
    result = headrace(url, "backlog")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)


def test_a_node_that_cannot_reach_the_broker_says_so(tmp_path: Path) -> None:
    waits = node(
        "streamer", "--nats-url", f"nats://127.0.0.1:{free_port()}", "--port", "0",
        log=tmp_path / "log",
    )  # fmt: skip
    try:
        wait_for(
            lambda: "no connection to the broker" in waits.said(), within_s=60, what=waits.said
        )
    finally:
        waits.terminate()
        assert waits.stop() == 0
