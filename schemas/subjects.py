"""Every name on the broker. Rule: no other module spells a subject, a stream or a bucket.

A name that users choose (tenant, model, worker) is escaped so that it is one subject token, a part
of a consumer name and a key-value key at once: ASCII letters, digits, `_` and `-` stand for
themselves, every other byte of its UTF-8 form is `=XX`.
"""

import re
import secrets
import time
from typing import Final, Literal, NamedTuple, get_args

import msgspec

Lane = Literal["online", "batch"]
LANES: Final[tuple[Lane, ...]] = get_args(Lane)

REQUESTS: Final = "REQUESTS"
REPLIES: Final = "REPLIES"
DEADLETTERS: Final = "DEADLETTERS"

WORKERS: Final = "workers"
MODELS: Final = "models"
STREAMERS: Final = "streamers"
SECRETS: Final = "secrets"
TENANTS: Final = "tenants"
LIMITS: Final = "limits"
RESPONSES: Final = "responses"
BLOBS: Final = "blobs"

PULL_GROUP: Final = "workers"

_REQUEST_ID: Final = re.compile(r"req_[0-9a-f]{32}")
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_-]+")
_PLAIN: Final = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")


def escape(name: str) -> str:
    """Return `name` as one subject token; `unescape` gives it back. Raises ValueError if empty."""
    if not name:
        raise ValueError("a name on the broker cannot be empty")
    return "".join(chr(b) if b in _PLAIN else f"={b:02X}" for b in name.encode())


def unescape(token: str) -> str:
    """Return the name that `escape` made `token` from. Raises ValueError for a foreign token."""
    if _PLAIN_NAME.fullmatch(token):
        return token
    head, *parts = token.encode().split(b"=")
    name = (head + b"".join(bytes([int(part[:2], 16)]) + part[2:] for part in parts)).decode()
    if escape(name) != token:
        raise ValueError(f"not a name on the broker: {token}")
    return name


def new_request_id(*, now_s: float | None = None) -> str:
    """Return a fresh request id, valid as a subject token: the second it was made in and 96 random
    bits, so that it cannot be guessed and an old one can be told from one that never was."""
    seconds = int(time.time() if now_s is None else now_s)
    return f"req_{seconds & 0xFFFFFFFF:08x}{secrets.token_hex(12)}"


def is_request_id(text: str) -> bool:
    """Tell whether `text` has the form of an id that `new_request_id` makes."""
    return _REQUEST_ID.fullmatch(text) is not None


def made_s(request: str) -> int:
    """Return when a request id was made, in seconds since the epoch."""
    return int(request.removeprefix("req_")[:8], 16)


class RequestSubject(NamedTuple):
    """Where a request waits: `requests.<lane>.<model>.<partition>.<tenant>.<request>`."""

    lane: Lane
    model: str
    partition: int
    tenant: str
    request: str

    def __str__(self) -> str:
        return (
            f"requests.{self.lane}.{escape(self.model)}.{self.partition}"
            f".{escape(self.tenant)}.{self.request}"
        )

    @staticmethod
    def parse(subject: str) -> "RequestSubject":
        """Read a subject back. Raises ValueError when it is not one of ours."""
        head, lane, model, partition, tenant, request = subject.split(".")
        if head != "requests" or lane not in LANES:
            raise ValueError(f"not a request subject: {subject}")
        return RequestSubject(
            lane="online" if lane == "online" else "batch",
            model=unescape(model),
            partition=int(partition),
            tenant=unescape(tenant),
            request=request,
        )


class Cell(NamedTuple):
    """What a request's subject says beside its id, as tokens: the unit that queues are counted in.

    The fields stand in the subject's order, for `requests_with`.
    """

    lane: str
    model: str
    partition: str
    tenant: str

    @staticmethod
    def parse(subject: str) -> "Cell | None":
        """Read the subject of a request, or the filter of a consumer; None for a foreign one."""
        _, *tokens = subject.split(".")
        if len(tokens) == 4 and tokens[3] == ">":
            return Cell(tokens[0], tokens[1], tokens[2], "*")
        return Cell(tokens[0], tokens[1], tokens[2], tokens[3]) if len(tokens) == 5 else None


class ReplySubject(NamedTuple):
    """Where a reply goes: `replies.<streamer>.<tenant>.<request>`, captured by REPLIES."""

    streamer: str
    tenant: str
    request: str

    def __str__(self) -> str:
        return f"replies.{escape(self.streamer)}.{escape(self.tenant)}.{self.request}"

    @staticmethod
    def parse(subject: str) -> "ReplySubject":
        """Read a subject back. Raises ValueError when it is not one of ours."""
        head, streamer, tenant, request = subject.split(".")
        if head != "replies":
            raise ValueError(f"not a reply subject: {subject}")
        return ReplySubject(unescape(streamer), unescape(tenant), request)


def replies_of(streamer: str) -> str:
    """Return the filter of all replies that one streamer relays."""
    return f"replies.{escape(streamer)}.>"


def replies_to(request: str, *, tenant: str | None = None) -> str:
    """Return the filter of one request's reply, whichever streamer relays it."""
    return f"replies.*.{'*' if tenant is None else escape(tenant)}.{request}"


def readers_of(*, tenant: str, request: str) -> str:
    """Return the subject on which further readers of a reply say that they are there, or answer a
    ShownQuestion."""
    return f"readers.{escape(tenant)}.{request}"


def answer_key(*, tenant: str, request: str) -> str:
    """Return the subject in `responses` of a kept answer; its further parts stand below it."""
    return f"$KV.{RESPONSES}.answer.{escape(tenant)}.{request}"


def response_key(*, tenant: str, response: str) -> str:
    """Return the subject in `responses` of the record of a stored response."""
    return f"$KV.{RESPONSES}.response.{escape(tenant)}.{response}"


def claim_key(*, tenant: str, digest: str) -> str:
    """Return the subject in `responses` of a claim; `digest` is that of its Idempotency-Key."""
    return f"$KV.{RESPONSES}.claim.{escape(tenant)}.{digest}"


def claimant_of(*, tenant: str, request: str) -> str:
    """Return the subject on which an ingress says that it is admitting a request."""
    return f"claimants.{escape(tenant)}.{request}"


def requests_of(
    *, model: str | None = None, tenant: str | None = None, request: str | None = None
) -> str:
    """Return the filter of a model's or a tenant's requests, or of one request among them."""
    model_token = "*" if model is None else escape(model)
    tenant_token = "*" if tenant is None else escape(tenant)
    return f"requests.*.{model_token}.*.{tenant_token}.{request or '*'}"


def requests_with(field: str, token: str) -> str:
    """Return the filter of the requests whose subject has `token` as this field of their cell."""
    return ".".join(["requests", *(token if name == field else "*" for name in Cell._fields), "*"])


def consumer_name(lane: Lane, model: str, partition: int) -> str:
    """Return the durable consumer of one partition."""
    return f"{lane}-{escape(model)}-{partition}"


def consumer_filter(lane: Lane, model: str, partition: int) -> str:
    """Return the filter of that consumer; no two of them overlap (a work queue's rule)."""
    return f"requests.{lane}.{escape(model)}.{partition}.>"


def deadletters_of(*, model: str | None = None, tenant: str | None = None) -> str:
    """Return the subject of a tenant's requests to a model that were given up, or the filter of
    those of a tenant, to a model, or of all."""
    model_token = "*" if model is None else escape(model)
    return f"deadletters.{model_token}.{'*' if tenant is None else escape(tenant)}"


def cancel_signal(tenant: str, request: str) -> str:
    """Return the subject on which workers hear that a request is no longer wanted."""
    return f"cancels.{escape(tenant)}.{request}"


CANCEL_SIGNALS: Final = "cancels.>"


def worker_holds(worker: str) -> str:
    """Return the subject on which a worker answers whether it still holds a request."""
    return f"workers.{escape(worker)}.holds"


def streamer_alive(streamer: str) -> str:
    """Return the subject on which a streamer answers as long as it lives."""
    return f"streamers.{escape(streamer)}.alive"


def streamer_reads(streamer: str) -> str:
    """Return the subject on which a streamer says whether a client of its own reads a reply."""
    return f"streamers.{escape(streamer)}.reads"


def worker_loses(worker: str) -> str:
    """Return the subject on which a worker hears that another has taken a request over."""
    return f"workers.{escape(worker)}.loses"


def streamer_shown(streamer: str) -> str:
    """Return the subject on which a streamer says how far it has shown a reply."""
    return f"streamers.{escape(streamer)}.shown"


SETTLEMENTS: Final = "settlements"
"""On which ingress hears what an ended request has used; its nodes share the messages."""


class Settlement(msgspec.Struct, frozen=True, array_like=True):
    """To ingress: this request has ended and used so many tokens; None: it never ran."""

    tenant: str
    request: str
    model: str
    prompt_tokens: int | None = None
    completion_tokens: int = 0

    @property
    def tokens(self) -> int | None:
        """What is charged."""
        return None if self.prompt_tokens is None else self.prompt_tokens + self.completion_tokens


def streamer_unread(streamer: str) -> str:
    """Return the subject on which a streamer says which requests it has no reader for."""
    return f"streamers.{escape(streamer)}.unread"


class UnreadQuestion(msgspec.Struct, frozen=True):
    """To a streamer: which of these requests have no reader with you? The answer is their list."""

    requests: tuple[str, ...]


class HoldsQuestion(msgspec.Struct, frozen=True):
    """To a worker: do you hold this request? If so, here is its new ack subject."""

    request: str
    ack: str


class LostNotice(msgspec.Struct, frozen=True):
    """To a worker: this attempt of another worker runs the request now."""

    request: str
    attempt: int


class ShownQuestion(msgspec.Struct, frozen=True):
    """To a streamer: how far has this reply's client seen? I have the tokens before `have`."""

    request: str
    have: int


def message_id(request: str, generation: int) -> str:
    """Return the Nats-Msg-Id of a request's message; a requeue counts the generation up."""
    return f"{request}/{generation}"
