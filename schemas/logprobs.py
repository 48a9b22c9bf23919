"""Log probabilities as the API writes them. Rule: JSON has no infinity."""

import math
from typing import Any, Final

from schemas.wire import TokenLogprob

_LEAST_LOGPROB: Final = -9999.0
"""What OpenAI reports for a token outside the likeliest."""


def logprob_of(token: TokenLogprob) -> dict[str, Any]:
    """Return a token's log probability as chats and responses have it, the likeliest ones too."""
    return _one(token.text, token.logprob) | {
        "top_logprobs": [_one(top.text, top.logprob) for top in token.top]
    }


def _one(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode())}


def finite(logprob: float) -> float:
    """Return a log probability that JSON can hold."""
    return logprob if math.isfinite(logprob) else _LEAST_LOGPROB
