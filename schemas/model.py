"""What the nodes tell each other about models, workers and streamers: registry entries."""

from typing import Final

import msgspec

PARTITIONS: Final = 32


class ModelCard(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A served model: all that ingress needs to render, tokenise and place a prompt.

    `files` maps a tokenizer file's name to its name in `blobs` (which holds its digest).
    `simulated` says that the test hook `sim` is understood. The parsers are those of the model's
    workers, by vLLM's names: without one for tools none can be called.
    """

    name: str
    created_s: int
    max_model_len: int
    partitions: int = PARTITIONS
    files: dict[str, str]
    simulated: bool = False
    tool_parser: str | None = None
    reasoning_parser: str | None = None

    @property
    def parses(self) -> bool:
        """Whether the workers parse what the model says in a chat."""
        return self.tool_parser is not None or self.reasoning_parser is not None


class WorkerEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A live worker's heartbeat."""

    name: str
    model: str
    slots: int
    running: int = 0
    waiting: int = 0
    draining: bool = False


class StreamerEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A live streamer's heartbeat."""

    name: str
    public_url: str
    open_streams: int = 0
    draining: bool = False
