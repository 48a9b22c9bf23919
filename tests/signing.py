"""Keys and tokens for tests, signed by PyJWT or put together by hand where it refuses to."""

import base64
import hashlib
import hmac
import json
from typing import Any

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

SECRET = "a secret of HS256, longer than 32 bytes"
RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())


def pem(key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey) -> str:
    """Return a key's public half."""
    return (
        key.public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        .decode()
    )


def private_pem(key: rsa.RSAPrivateKey) -> str:
    """Return a key's private half, which belongs nowhere."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ).decode()


def jwk(key: Any, name: str | None, **more: Any) -> dict[str, Any]:
    """Return a key's public half as a JWK."""
    kind = RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else ECAlgorithm
    found: dict[str, Any] = json.loads(kind.to_jwk(key.public_key()))
    return found | ({} if name is None else {"kid": name}) | more


def signed(
    payload: dict[str, Any], key: Any = SECRET, algorithm: str = "HS256", **headers: Any
) -> bytes:
    """Return a token as PyJWT makes it."""
    return jwt.encode(payload, key, algorithm, headers=headers or None).encode()


def by_hand(header: str, payload: str, secret: str = SECRET) -> bytes:
    """Return a token of these very texts with a right signature by HMAC-SHA256."""
    body = b".".join(encoded(part.encode()) for part in (header, payload))
    return body + b"." + encoded(hmac.digest(secret.encode(), body, hashlib.sha256))


def encoded(raw: bytes) -> bytes:
    """Return bytes as base64url without padding."""
    return base64.urlsafe_b64encode(raw).rstrip(b"=")
