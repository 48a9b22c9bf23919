"""JSON Web Tokens (RFC 7519): the one door to PyJWT. Rule: a key fits one algorithm, and a token
chooses neither its key's address nor its kind.

So `none`, a public key taken for a secret, and keys that a token brings along (`jku`, `jwk`, `x5u`,
`x5c`) have no way in. What PyJWT reads leniently (characters outside base64url, duplicate names) is
refused before it. A verified token is remembered by its SHA-256 until it expires.
"""

import base64
import hashlib
import json
import math
import re
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jwt
import msgspec
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from headrace.tenant_settings import JwtSettings
from schemas.tenant import Name

TOKEN_BYTES_MAX: Final = 8192
VERIFIED_MAX: Final = 10_000
RSA_BITS_MIN: Final = 2048
SECRET_BYTES_MIN: Final = 32
"""RFC 7518, section 3.2: a shorter one can be guessed offline from any token."""

_FORM: Final = re.compile(rb"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")
_REFUSED_HEADERS: Final = frozenset({"jku", "jwk", "x5u", "x5c", "crit", "b64"})
_BY_KIND: Final = {"RSA": "RS256", "EC": "ES256", "oct": "HS256"}
_FAULTS: Final = (
    *(jwt.PyJWTError, ArithmeticError, LookupError),
    *(RecursionError, TypeError, ValueError),
)


class BadToken(Exception):
    """The token proves nothing."""


class UnknownKey(BadToken):
    """The token names a key that is not in the set: it may have been added since."""


class BadKeys(Exception):
    """The keys to verify tokens with cannot be used."""


class Claims(NamedTuple):
    """What a verified token says: its tenant, and until when (seconds since the epoch)."""

    tenant: str
    until_s: float


class SigningKey(NamedTuple):
    """A key, its name if it has one, and the one algorithm it is for."""

    name: str | None
    algorithm: str
    key: Any


def static_keys(settings: JwtSettings) -> tuple[SigningKey, ...]:
    """Return the key that the configuration holds. Raises BadKeys."""
    text = settings.key or ""
    key = _public_pem(text) if settings.is_pem else SigningKey(None, "HS256", text.encode())
    if key.algorithm not in settings.used:
        raise BadKeys(f"the key is one of {key.algorithm}, which algorithms does not name")
    return (key,)


def _public_pem(text: str) -> SigningKey:
    pem = text.strip().encode()
    for kind in (RSAAlgorithm(RSAAlgorithm.SHA256), ECAlgorithm(ECAlgorithm.SHA256)):
        try:
            key = kind.prepare_key(pem)
        except _FAULTS:
            continue
        return _public("RS256" if isinstance(kind, RSAAlgorithm) else "ES256", None, key)
    raise BadKeys("the key is no public key of RSA or an elliptic curve")


def read_jwks(data: bytes, algorithms: Sequence[str]) -> tuple[SigningKey, ...]:
    """Return a JWK set's keys (RFC 7517) for these algorithms. Raises BadKeys."""
    try:
        found = [_jwk(raw, algorithms) for raw in json.loads(data)["keys"]]
    except _FAULTS as error:
        raise BadKeys(f"this is no JWK set: {type(error).__name__}") from error
    return tuple(key for key in found if key is not None)


def _jwk(raw: Mapping[str, Any], algorithms: Sequence[str]) -> SigningKey | None:
    """Return one key; None for one that is for something else."""
    algorithm = _BY_KIND.get(raw["kty"], "")
    if raw.get("alg", algorithm) != algorithm or algorithm not in algorithms:
        return None
    if raw.get("use", "sig") != "sig" or "verify" not in raw.get("key_ops", ["verify"]):
        return None
    if algorithm == "ES256" and raw.get("crv") != "P-256":
        return None
    public = {name: value for name, value in raw.items() if name not in {"d", "p", "q"}}
    key = jwt.PyJWK(public, algorithm).key
    return _public(algorithm, raw.get("kid"), key)


def _public(algorithm: str, name: str | None, key: Any) -> SigningKey:
    if hasattr(key, "private_numbers"):
        raise BadKeys("the public key is needed, not the private one")
    if algorithm == "RS256" and key.key_size < RSA_BITS_MIN:
        raise BadKeys(f"an RSA key needs at least {RSA_BITS_MIN} bits")
    if algorithm == "ES256" and key.curve.name != "secp256r1":
        raise BadKeys("ES256 needs a key on the curve P-256")
    return SigningKey(name, algorithm, key)


class Verifier:
    """Reads tokens; waits for nothing, and is given its keys."""

    def __init__(self, settings: JwtSettings, keys: Iterable[SigningKey] = ()) -> None:
        self._settings = settings
        self._keys: tuple[SigningKey, ...] = ()
        self._verified: OrderedDict[bytes, Claims] = OrderedDict()
        self.use(keys)

    @property
    def weak(self) -> bool:
        """Whether a secret is shorter than RFC 7518 allows."""
        return any(
            each.algorithm == "HS256" and len(each.key) < SECRET_BYTES_MIN for each in self._keys
        )

    def use(self, keys: Iterable[SigningKey]) -> None:
        """Believe these keys from now on, and no token for the sake of an earlier one."""
        self._keys = tuple(key for key in keys if key.algorithm in self._settings.used)
        self._verified.clear()

    def verify(self, token: bytes, *, now_s: float) -> Claims:
        """Return what a token says. Raises BadToken, UnknownKey among them."""
        if len(token) > TOKEN_BYTES_MAX:
            raise BadToken
        digest = hashlib.sha256(token).digest()
        claims = self._verified.get(digest)
        if claims is None:
            claims = self._read(token)
            self._verified[digest] = claims
            if len(self._verified) > VERIFIED_MAX:
                self._verified.popitem(last=False)
        else:
            self._verified.move_to_end(digest)
        if claims.until_s <= now_s:
            raise BadToken
        return claims

    def _read(self, token: bytes) -> Claims:
        if not _FORM.fullmatch(token):
            raise BadToken
        try:
            header, payload = (_members(part) for part in token.split(b".")[:2])
            return self._claims(token.decode(), header, payload)
        except _FAULTS as error:
            raise BadToken from error

    def _claims(self, token: str, header: dict[str, Any], payload: dict[str, Any]) -> Claims:
        until_s = payload["exp"]
        if isinstance(until_s, bool) or not math.isfinite(until_s):
            raise BadToken
        tenant = msgspec.convert(_claim(payload, self._settings.tenant_claim), Name)
        tenant.encode()  # half a surrogate pair is no name
        settings = self._settings
        for key in self._fitting(header):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a short secret is said once, at start
                try:
                    jwt.decode(
                        token,
                        key.key,
                        algorithms=[key.algorithm],
                        audience=settings.audience,
                        issuer=settings.issuer,
                        options={"require": self._required},
                    )
                except jwt.InvalidSignatureError:
                    continue
            return Claims(tenant, float(until_s))
        raise BadToken

    @property
    def _required(self) -> list[str]:
        named = {"aud": self._settings.audience, "iss": self._settings.issuer}
        return ["exp", *(name for name, value in named.items() if value is not None)]

    def _fitting(self, header: dict[str, Any]) -> list[SigningKey]:
        """Return the keys that may have signed it. Raises BadToken."""
        if _REFUSED_HEADERS & header.keys():
            raise BadToken
        algorithm, name = header.get("alg"), header.get("kid")
        if algorithm not in self._settings.used or not isinstance(name, str | None):
            raise BadToken
        fitting = [each for each in self._keys if each.algorithm == algorithm]
        if name is None or self._settings.key is not None:
            return fitting
        named = [each for each in fitting if each.name == name]
        if not named:
            raise UnknownKey
        return named


def _members(part: bytes) -> dict[str, Any]:
    """Return a part's JSON object. Raises ValueError, for a name that stands twice as well."""
    raw = base64.urlsafe_b64decode(part + b"=" * (-len(part) % 4))
    members = json.loads(raw, object_pairs_hook=_once, parse_constant=_no_constant)
    if not isinstance(members, dict):
        raise TypeError
    return members


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a name stands twice")
    return members


def _no_constant(text: str) -> None:
    raise ValueError(text)


def _claim(payload: Mapping[str, Any], name: str) -> Any:
    """Return a claim by its whole name, else by its path. Raises LookupError and TypeError."""
    if name in payload:
        return payload[name]
    found: Any = payload
    for step in name.split("."):
        found = found[step]
    return found
