"""What every operator command that talks to the broker shares: where it is, and how it says no.

Exit status: 0, 1 (not found, refused), 2 (broker away, usage).
"""

import asyncio
import sys
from collections.abc import Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import typer

from headrace import settings
from headrace.bus import BrokerAway, BrokerRefused, Bus, BusSettings, connection
from headrace.datadir import DataDir, NothingRuns

T = TypeVar("T")

CONNECT_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class OperatorSettings:
    """What every operator command that talks to the broker takes."""

    nats_url: settings.OptionalNatsUrl = None
    nats_creds: settings.NatsCreds = None
    nats_ca: settings.NatsCa = None
    data_dir: settings.OptionalDataDir = None
    as_json: settings.AsJson = False
    config: settings.Config = settings.NO_CONFIG

    @property
    def bus(self) -> BusSettings:
        """Where the broker is. Raises NothingRuns."""
        return BusSettings(
            url=find_nats_url(self.nats_url, self.data_dir),
            creds=None if self.nats_creds is None else str(self.nats_creds),
            ca=None if self.nats_ca is None else str(self.nats_ca),
        )

    def connected(self) -> AbstractAsyncContextManager[Bus]:
        """Connect for the length of a block. Raises NothingRuns and BrokerAway."""
        return connection(self.bus, name="operator", timeout_s=CONNECT_TIMEOUT_S)


def find_nats_url(nats_url: str | None, data_dir: Path | None) -> str:
    """Return where the broker is: as named, else that of the data dir. Raises NothingRuns."""
    if nats_url is not None:
        return nats_url
    return DataDir(data_dir or settings.DATA_DIR).running().nats_url


def refuse(reason: object, *, status: int = 1) -> NoReturn:
    """End the command with one line on stderr."""
    print(f"headrace: {reason}", file=sys.stderr)
    raise typer.Exit(status)


def warn(of: str) -> None:
    """Say one line on stderr, and go on."""
    print(f"headrace: {of}", file=sys.stderr)


def counted(number: int, what: str) -> str:
    """Return so many of a thing in words, such as `1 request` and `2 requests`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def columns(lines: Sequence[Sequence[str]]) -> list[str]:
    """Return a table's lines, the heads first, with each column as wide as its widest cell."""
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return [
        " ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def operate(work: Coroutine[Any, Any, T]) -> T:
    """Run what talks to the broker; end the command, saying why, when it cannot."""
    try:
        return asyncio.run(work)
    except NothingRuns as error:
        refuse(f"{error}, --nats-url a broker")
    except BrokerRefused as error:
        refuse(f"the broker refused: {error}")
    except BrokerAway as error:
        refuse(f"the broker is away: {error}", status=2)
