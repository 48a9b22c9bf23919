"""Client certificates: who may vouch for them, and which subjects name a tenant."""

import hashlib

import pytest

from headrace.tenant_settings import MtlsSettings
from ingress.auth import Caller, Gate
from ingress.certificate import Certificates, common_name
from schemas.errors import InvalidApiKey

PROXY = "10.0.0.7"
PLAIN = MtlsSettings(header="X-Client-DN", proxies=("10.0.0.0/24", "::1"))
MAPPED = MtlsSettings(
    header="x-client-dn", proxies=(PROXY,), subjects={"CN=a,O=Acme": "acme", "batch.example": "b"}
)


def gate(settings: MtlsSettings = PLAIN) -> Gate:
    keys = [("keyed", hashlib.sha256(b"k").hexdigest())]
    return Gate(keys, certificates=Certificates(settings))


def shown(*subjects: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), *((b"x-client-dn", subject) for subject in subjects)]


@pytest.mark.parametrize("peer", [PROXY, "10.0.0.255", "::1", "::ffff:10.0.0.7"])
def test_a_proxys_word_names_the_tenant(peer: str) -> None:
    assert gate().identify(shown(b"CN=acme,O=Acme"), peer=peer) == Caller("acme")


@pytest.mark.parametrize("peer", [None, "", "10.0.1.7", "127.0.0.1", "::2", "10.0.0.7.evil", "x"])
def test_anybody_elses_word_is_nothing(peer: str | None) -> None:
    with pytest.raises(InvalidApiKey):
        gate().identify(shown(b"CN=acme"), peer=peer)
    key = (b"authorization", b"Bearer k")
    assert gate().identify([*shown(b"CN=acme"), key], peer=peer) == Caller("keyed")


def test_a_key_goes_before_a_certificate() -> None:
    headers = [*shown(b"CN=acme"), (b"authorization", b"Bearer k")]
    assert gate().identify(headers, peer=PROXY) == Caller("keyed")
    with pytest.raises(InvalidApiKey):
        gate().identify([*shown(b"CN=acme"), (b"authorization", b"Bearer x")], peer=PROXY)


@pytest.mark.parametrize(
    "subjects",
    [
        (b"CN=a", b"CN=b"),
        (b"CN=a,CN=b",),
        (b"O=Acme",),
        (b"CN=",),
        (b"/O=Acme/CN=a",),
        (b'CN="a"',),
        (b"CN=a\\",),
        (b"CN=a\\00",),
        (b"CN=\\ff",),
        (b"acme",),
        (b"CN=a\x00",),
        (b"CN=" + b"a" * 129,),
        (b"O=" + b"a" * 2000 + b",CN=a",),
        (b"",) * 2,
    ],
)
def test_a_subject_that_names_nobody_or_two_is_refused(subjects: tuple[bytes, ...]) -> None:
    with pytest.raises(InvalidApiKey) as refused:
        gate().identify(shown(*subjects), peer=PROXY)
    assert "Acme" not in refused.value.message


@pytest.mark.parametrize(
    ("subject", "name"),
    [
        ("CN=acme", "acme"),
        ("O=Acme\\, Inc.,CN=acme", "acme"),
        ("O=x\\,CN=admin,CN=acme", "acme"),
        ("cn=acme+UID=7,C=DE", "acme"),
        ("2.5.4.3=acme", "acme"),
        ("CN=caf\\C3\\A9", "café"),
        ("CN=a\\,b", "a,b"),
        ("CN = spaced , O = x", "spaced"),
    ],
)
def test_a_common_name_is_read_as_rfc_4514_says(subject: str, name: str) -> None:
    assert common_name(subject) == name


def test_subjects_can_be_mapped_and_others_are_then_nobody() -> None:
    assert gate(MAPPED).identify(shown(b"CN=a,O=Acme"), peer=PROXY) == Caller("acme")
    assert gate(MAPPED).identify(shown(b"O=x,CN=batch.example"), peer=PROXY) == Caller("b")
    for subject in (b"CN=a", b"CN=a,O=Other", b"CN=CN\\=a\\,O\\=Acme"):
        with pytest.raises(InvalidApiKey):
            gate(MAPPED).identify(shown(subject), peer=PROXY)


@pytest.mark.parametrize(
    ("header", "proxies"),
    [("", ("10.0.0.1",)), ("x-dn", ()), ("x-dn", ("proxy",)), ("Authorization", ("10.0.0.1",))],
)
def test_settings_that_trust_nobody_or_anybody_are_refused(
    header: str, proxies: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        MtlsSettings(header=header, proxies=proxies)
