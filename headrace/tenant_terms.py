"""A tenant's terms on a command line: as flags, and as they are listed.

Rule: what cannot be is said with the flag and what may stand there.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
import typer

from headrace.operate import OperatorSettings, refuse
from headrace.tenants import Record
from schemas.tenant import (
    DEADLINE_S_MAX,
    UNLIMITED,
    WEIGHT_MAX,
    OnRevoke,
    PriorityClass,
    Tenant,
)

TenantName = Annotated[str, typer.Argument(metavar="TENANT", help="The tenant's name.")]

TERMS: Final = tuple(name for name in Tenant.__struct_fields__ if name != "name")
NAME_RULE: Final = "a name has 1 to 128 characters, none of them a control character"
_FLAGS: Final = {"name": "TENANT", "models": "--model"}


def _limit(flag: str, help_: str, **more: Any) -> Any:
    return typer.Option(f"--{flag}", help=help_, **more)


@dataclass(frozen=True, kw_only=True)
class SetSettings(OperatorSettings):
    """What `headrace tenants set` takes: the terms to change. Raises ValueError."""

    tenant: TenantName
    tier: Annotated[str | None, _limit("tier", "Whose terms hold where it has none.")] = None
    requests_per_minute: Annotated[
        int | None, _limit("requests-per-minute", "Requests a minute.", min=1)
    ] = None
    tokens_per_minute: Annotated[
        int | None, _limit("tokens-per-minute", "Tokens a minute.", min=1)
    ] = None
    burst: Annotated[int | None, _limit("burst", "Requests at once after a pause.", min=1)] = None
    concurrent_requests: Annotated[
        int | None, _limit("concurrent-requests", "Open requests, waiting ones too.", min=1)
    ] = None
    queued_requests: Annotated[
        int | None, _limit("queued-requests", "Waiting requests.", min=0)
    ] = None
    max_input_tokens: Annotated[
        int | None, _limit("max-input-tokens", "Tokens of a prompt.", min=1)
    ] = None
    max_output_tokens: Annotated[
        int | None, _limit("max-output-tokens", "Tokens of an answer.", min=1)
    ] = None
    models: Annotated[
        list[str] | None, typer.Option("--model", help="An allowed model; may be repeated.")
    ] = None
    weight: Annotated[
        int | None, _limit("weight", "Its share while others wait too.", min=1, max=WEIGHT_MAX)
    ] = None
    priority_class: Annotated[
        PriorityClass | None, _limit("priority-class", "Which class its requests wait in.")
    ] = None
    deadline_s: Annotated[
        float | None, _limit("deadline-s", "Deadline of requests that name none.")
    ] = None
    share_prefixes: Annotated[
        bool | None,
        typer.Option("--share-prefixes/--own-prefixes", help="Share KV blocks with others."),
    ] = None
    on_revoke: Annotated[
        OnRevoke | None, _limit("on-revoke", "What a revoked key's requests do.")
    ] = None
    moderation: Annotated[
        bool | None,
        typer.Option("--moderation/--no-moderation", help="Whether the moderator looks at it."),
    ] = None
    clear: Annotated[
        list[str] | None,
        typer.Option("--clear", metavar="TERM", help="Take a term away; may be repeated."),
    ] = None

    def __post_init__(self) -> None:
        if self.deadline_s is not None and not 0 < self.deadline_s <= DEADLINE_S_MAX:
            raise ValueError(f"--deadline-s is above 0, at most {DEADLINE_S_MAX}")
        for term in self.cleared:
            if term not in TERMS:
                raise ValueError(f"--clear {term}: no such term; there are {', '.join(TERMS)}")

    @property
    def cleared(self) -> tuple[str, ...]:
        """The terms to take away."""
        return tuple(term.replace("-", "_") for term in self.clear or ())


def changed(wanted: SetSettings, there: Record | None) -> Tenant:
    """Return the tenant as it shall be; ends the command for a term that cannot be so."""
    terms: dict[str, Any] = {"name": wanted.tenant}
    if there is not None and there.gone_s is None:
        terms |= msgspec.structs.asdict(there.value)
    terms |= dict.fromkeys(wanted.cleared)
    own = {each.name for each in dataclasses.fields(wanted)} & set(TERMS)
    terms |= {name: value for name in own if (value := getattr(wanted, name)) is not None}
    try:
        return msgspec.convert(terms, Tenant)
    except msgspec.ValidationError as error:
        refuse(_explained(str(error)), status=2)


def _explained(error: str) -> str:
    """Put the flag in the place of the path that msgspec names."""
    reason, _, path = error.partition(" - at `$.")
    name = path.rstrip("`").partition("[")[0]
    flag = _FLAGS.get(name, f"--{name.replace('_', '-')}")
    if name in ("name", "tier", "models"):
        reason = NAME_RULE
    return f"{flag}: {reason}"


def said(row: Mapping[str, Any]) -> str:
    """Return a tenant's tier and its terms that are not the defaults, as they are written."""
    defaults = msgspec.structs.asdict(UNLIMITED) | {"tier": None, "name": row["name"]}
    return " ".join(
        f"{name}={_written(value)}" for name, value in row.items() if value != defaults[name]
    )


def _written(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(value) if isinstance(value, tuple) else str(value)
