"""What a request may use. Rule: cost = prompt tokens + the most tokens it can make."""

from typing import NamedTuple

from schemas.errors import ContextLengthExceeded, InvalidRequest, OverPolicy


class Cost(NamedTuple):
    """Tokens of the prompt, and at most so many tokens of each choice."""

    prompt_tokens: int
    output_tokens: int
    choices: int

    @property
    def total_tokens(self) -> int:
        """What is reserved for the request."""
        return self.prompt_tokens + self.output_tokens * self.choices


def cost_of(
    *,
    prompt_tokens: int,
    asked_tokens: int | None,
    choices: int,
    max_model_len: int,
    param: str,
    input_max: int | None = None,
    output_max: int | None = None,
    output_param: str | None = "max_tokens",
) -> Cost:
    """Return a request's cost; without a bound of its own it may fill the model's context.

    `param` names the field that holds the prompt, `output_param` the one that bounds the answer:
    None where the client named none, whose answer is cut to `output_max` instead. That is a bound
    on all choices together. Raises InvalidRequest for an empty prompt, ContextLengthExceeded, and
    OverPolicy above a tenant's own bounds.
    """
    if prompt_tokens == 0:
        raise InvalidRequest("The prompt is empty.", param=param)
    if input_max is not None and prompt_tokens > input_max:
        raise OverPolicy(
            f"The prompt is {prompt_tokens} tokens long; {input_max} are allowed.", param=param
        )
    room = max_model_len - prompt_tokens
    if room < 1:
        raise ContextLengthExceeded(
            f"The prompt is {prompt_tokens} tokens long; this model's context is"
            f" {max_model_len} tokens, of which at least one is the answer's.",
            param=param,
        )
    if asked_tokens is not None and asked_tokens > room:
        raise ContextLengthExceeded(
            f"The prompt's {prompt_tokens} tokens and {asked_tokens} more are over this model's"
            f" context of {max_model_len}.",
            param=output_param or "max_tokens",
        )
    wanted = room if asked_tokens is None else asked_tokens
    if output_max is None or wanted * choices <= output_max:
        return Cost(prompt_tokens, wanted, choices)
    if output_param is not None and wanted > output_max:
        raise OverPolicy(
            f"{wanted} output tokens are asked for; {output_max} are allowed.", param=output_param
        )
    if output_param is not None or choices > output_max:
        raise OverPolicy(
            f"{choices} choices together may have {output_max} output tokens.", param="n"
        )
    return Cost(prompt_tokens, output_max // choices, choices)
