"""How long an answer will be: learned per tenant and model from the answers before. Pure."""

from typing import Final

WEIGHT: Final = 0.2
"""Of the latest answer in the mean: the last five say as much as all before."""
PAIRS_MAX: Final = 10_000


class Predictor:
    """Remembers the mean length of answers."""

    def __init__(self) -> None:
        self._mean: dict[tuple[str, str], float] = {}

    def learn(self, tenant: str, model: str, *, tokens: int) -> None:
        """Note how many tokens an answer had."""
        pair = (tenant, model)
        before = self._mean.pop(pair, None)
        if before is None and len(self._mean) >= PAIRS_MAX:
            del self._mean[next(iter(self._mean))]  # the one that was not heard of for longest
        self._mean[pair] = tokens if before is None else before + WEIGHT * (tokens - before)

    def predict(self, tenant: str, model: str, *, tokens_max: int) -> int:
        """Return how many tokens an answer of at most `tokens_max` is expected to have."""
        mean = self._mean.get((tenant, model))
        return tokens_max if mean is None else max(1, min(tokens_max, round(mean)))
