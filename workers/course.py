"""How a request goes on that another worker had begun. Rule: this file decides, and asks nobody.

What the log holds and what a streamer says was shown come in; `recovery` asks for both.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final

from schemas.wire import Envelope, Piece, span
from workers.history import History

DEATHS_MAX: Final = 3
SUSPECT_DEATHS: Final = 2


class Course(Enum):
    """What is to become of a request that was claimed again."""

    ENDED = "nothing: it ended before it was claimed"
    GO_ON = "go on after what was made"
    ANEW = "begin anew: nobody has seen anything"
    LOST = "neither: it would be wrong to go on, and something was seen"
    DEADLY = "no more: it has killed as many workers as it may"


@dataclass(frozen=True, slots=True)
class Shown:
    """What a streamer says of a reply: how far its client has seen it, and the pieces that the
    asker lacks, as far as the streamer still has them."""

    next_seq: int
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True, slots=True)
class Recovery:
    """How a request goes on."""

    course: Course
    made: tuple[Piece, ...]
    resume_at: int
    deaths: int


def course_of(envelope: Envelope, history: History, shown: Shown | None) -> Recovery:
    """Decide how a request goes on.

    What the client has seen wins, also over a log that holds less. Where the streamer does not
    answer, all that the log holds may have been seen.
    """
    made = history.pieces
    if shown is not None and shown.next_seq > history.next_seq:
        made += shown.pieces
    seen = history.next_seq if shown is None else shown.next_seq
    if history.ended:
        course = Course.ENDED
    elif history.deaths >= DEATHS_MAX:
        course = Course.DEADLY
    elif span(made) >= seen and (not made or _can_go_on(envelope, made)):
        course = Course.GO_ON
    elif seen == 0:
        course = Course.ANEW
    else:
        course = Course.LOST
    if course is Course.ANEW:
        return Recovery(course, (), 0, history.deaths)
    return Recovery(course, made, history.next_seq, history.deaths)


def _can_go_on(envelope: Envelope, made: tuple[Piece, ...]) -> bool:
    """Tell whether prompt and tokens say all that the generation depends on.

    A parser's state, a grammar's and a count of what was said before are lost with the worker.
    """
    sampling = envelope.sampling
    return (
        sampling.n == 1
        and not sampling.presence_penalty
        and not sampling.frequency_penalty
        and sampling.repetition_penalty in (None, 1.0)
        and not sampling.min_tokens
        and not sampling.bad_words
        and not (sampling.stop and sampling.include_stop_str_in_output)
        and sampling.structured is None
        and envelope.parsing is None
        and all(piece.delta is None for piece in made)
    )
