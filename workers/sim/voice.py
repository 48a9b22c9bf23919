"""What one choice says next. Rule: `say(k)` is token k; its text is what may be sent by then.

`FreeVoice` is the common case, a story with nothing to hold back: its pieces are made once per
vocabulary and shared. `Voice` adds stop strings, log probabilities and scripts.
"""

from functools import lru_cache
from typing import Final, Protocol

from schemas.wire import Piece, Sampling, TokenLogprob, TopToken
from workers.sim.script import Line, Script
from workers.sim.story import PAGE, Story
from workers.sim.text import Assembler
from workers.sim.vocabulary import Vocabulary

_MASK: Final = PAGE - 1
_SHIFT: Final = PAGE.bit_length() - 1


class Speaker(Protocol):
    """A choice's voice: `end` tokens at most; `reason` is set with the last of them."""

    end: int
    reason: str | None

    def say(self, k: int) -> Piece:
        """Return token k; to be asked for in order."""
        ...


def speaker_of(
    story: Story,
    script: Script | None,
    sampling: Sampling,
    *,
    choice: int,
    room: int,
    vocabulary: Vocabulary,
) -> Speaker:
    """Return the voice of a choice that has room for `room` tokens in the model's context."""
    limit = min(sampling.max_tokens, room)
    lines = None if script is None else script.lines
    if lines is not None:
        natural, whole = len(lines), len(lines) <= limit
    else:
        # The token after a story's last would be EOS: at the limit it is not reached.
        natural = max(story.length, sampling.min_tokens)
        whole = natural < limit and not sampling.ignore_eos
    reason = "length"
    if whole:
        reason = (script.reason if script is not None else None) or "stop"
    end = natural if whole else limit
    if lines is None and not _is_watched(sampling):
        return FreeVoice(story, end=end, end_reason=reason, choice=choice, vocabulary=vocabulary)
    return Voice(
        story, script, sampling, end=end, end_reason=reason, choice=choice, vocabulary=vocabulary
    )


def _is_watched(sampling: Sampling) -> bool:
    """Whether each token must be looked at."""
    return bool(sampling.stop or sampling.stop_token_ids) or sampling.logprobs is not None


class FreeVoice:
    """A story whose every token is sent as it is."""

    __slots__ = ("_end_reason", "_last", "_page", "_pieces", "_story", "end", "reason")

    def __init__(
        self, story: Story, *, end: int, end_reason: str, choice: int, vocabulary: Vocabulary
    ) -> None:
        self._story = story
        self._pieces = _shared_pieces(choice, vocabulary)
        self._page: list[Piece] = []
        self._end_reason = end_reason
        self._last = end - 1
        self.end = end
        self.reason: str | None = None

    def say(self, k: int) -> Piece:
        """Return token k; to be asked for in order."""
        place = k & _MASK
        if not place or not self._page:
            pieces = self._pieces
            self._page = [pieces[token] for token in self._story.page(k >> _SHIFT)]
        if k == self._last:
            self.reason = self._end_reason
        return self._page[place]


class Voice:
    """A story or a script, with stop strings and log probabilities."""

    def __init__(
        self,
        story: Story,
        script: Script | None,
        sampling: Sampling,
        *,
        end: int,
        end_reason: str,
        choice: int,
        vocabulary: Vocabulary,
    ) -> None:
        self._story = story
        self._script = script
        self._lines = None if script is None else script.lines
        self._last_text = end - 1 if self._lines is None or script is None else script.texts - 1
        self._assembler = Assembler(sampling.stop, keep=sampling.include_stop_str_in_output)
        self._ends = frozenset(sampling.stop_token_ids)
        self._min_tokens = sampling.min_tokens
        self._alternatives = sampling.logprobs
        self._choice = choice
        self._vocabulary = vocabulary
        self._end_reason = end_reason
        self._page: list[int] = []
        self.end = end
        self.reason: str | None = None

    def say(self, k: int) -> Piece:
        """Return token k; to be asked for in order."""
        last = k == self.end - 1
        text, delta, ends = "", None, False
        if self._lines is None:
            token = self._told(k)
            content = self._vocabulary.content[token]
            ends = token in self._ends and k >= self._min_tokens
            # A token that ends the answer is none of its text, as in vLLM.
            text = self._assembler.push(b"" if ends else content, last=last or ends)
        else:
            line = self._lines[k]
            token = self._vocabulary.id_of(line.content)
            content = line.content
            if line.call is None:
                text = self._assembler.push(content, last=last or k == self._last_text)
            else:
                delta = line.delta(self._call_id(line))
        if self._assembler.stopped or ends:
            self.reason = "stop"
        elif last:
            self.reason = self._end_reason
        return Piece(self._choice, text, (token,), self._logprobs(k, token, content), delta)

    def _told(self, k: int) -> int:
        if not k & _MASK or not self._page:
            self._page = self._story.page(k >> _SHIFT)
        return self._page[k & _MASK]

    def _call_id(self, line: Line) -> str:
        return self._story.call_id(line.call or 0)

    def _logprobs(self, k: int, token: int, content: bytes) -> tuple[TokenLogprob, ...] | None:
        """Return the token's log probability; the chosen token is the likeliest of `top`."""
        if self._alternatives is None:
            return None
        told = () if self._script is None else self._script.logprobs
        chosen = told[k] if k < len(told) else -((token * 31 + k * 17) % 199 + 1) / 100
        text = content.decode(errors="replace")
        top = [TopToken(text, chosen)] if self._alternatives else []
        words = self._vocabulary.words
        for rank in range(1, self._alternatives):
            other = words[(token + k + rank) % len(words)]
            if other == token:
                other = words[(token + k) % len(words)]
            top.append(TopToken(self._vocabulary.text(other), chosen - 0.5 * rank))
        return (TokenLogprob(text, chosen, tuple(top)),)


@lru_cache(maxsize=128)
def _shared_pieces(choice: int, vocabulary: Vocabulary) -> tuple[Piece, ...]:
    return tuple(
        Piece(choice, vocabulary.text(token), (token,)) for token in range(vocabulary.size)
    )
