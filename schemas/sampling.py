"""What an engine is told about a request: how to choose tokens, and how to read them.

Part of the envelope (`schemas.wire`): old bytes must decode, so new fields have defaults.
"""

import msgspec


class Structured(msgspec.Struct, frozen=True, omit_defaults=True):
    """The form the answer must have, in the words of vLLM's StructuredOutputsParams.

    Exactly one of the first six is set. `json` is a schema as JSON text.
    """

    json: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None
    structural_tag: str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to choose tokens, in the words of vLLM's SamplingParams.

    None is the engine's own choice: of `seed` a random one, of the others the model's default.
    """

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    ignore_eos: bool = False
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    structured: Structured | None = None


class Parsing(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a worker's tool and reasoning parsers must know of a chat.

    `tools` are JSON as chat templates are given them; `choice` is `none`, `auto`, `required`, or
    `function` with the function's name; `template` holds the template's further variables, as JSON.
    """

    tools: bytes = b""
    choice: str = "none"
    function: str | None = None
    parallel: bool = True
    reasoning: bool = True
    template: bytes = b""
