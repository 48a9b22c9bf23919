"""What headrace.toml says of what is asked and said: `[moderation]` and `[logging]`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import msgspec

from headrace.moderation import ModerationSettings
from headrace.patterns import compile_patterns
from headrace.tenant_settings import read_table


class LoggingSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[logging]`: whether prompts are logged, what is redacted beside the defaults, and how many
    characters of a prompt stand in a line."""

    prompts: bool = False
    redact: tuple[str, ...] = ()
    prompt_characters: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = 2000

    def __post_init__(self) -> None:
        compile_patterns(self.redact)


@dataclass(frozen=True, slots=True)
class Content:
    """Both tables; None for no moderation."""

    moderation: ModerationSettings | None = None
    logging: LoggingSettings = field(default_factory=LoggingSettings)


NO_CONTENT: Final = Content()


def read_content(document: Mapping[str, Any]) -> Content:
    """Read both tables. Raises ValueError."""
    moderation, logging = document.get("moderation"), document.get("logging", {})
    return Content(
        None if moderation is None else read_table(moderation, "[moderation]", ModerationSettings),
        read_table(logging, "[logging]", LoggingSettings),
    )
