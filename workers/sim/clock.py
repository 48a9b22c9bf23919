"""How long things take: a step of the whole batch, or the tokens of one request on its own clock.

A step costs a fixed time, a time per prompt token in it and a time per sequence that decodes: the
usual linear model of a batched transformer. All of it is 0 unless asked for.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimeModel:
    """What steps cost, and the start."""

    step_us: float = 0.0
    prefill_us_per_token: float = 0.0
    decode_us_per_seq: float = 0.0
    startup_s: float = 0.0

    @property
    def instant(self) -> bool:
        """Whether every step takes no time."""
        return not (self.step_us or self.prefill_us_per_token or self.decode_us_per_seq)

    def step_s(self, *, prefill_tokens: int, decoding: int) -> float:
        """Return how long a step lasts."""
        us = (
            self.step_us
            + self.prefill_us_per_token * prefill_tokens
            + self.decode_us_per_seq * decoding
        )
        return us / 1e6


@dataclass(frozen=True, slots=True)
class Pace:
    """A request's own clock: its first token after `ttft_s`, the others `itl_s` apart."""

    ttft_s: float
    itl_s: float
