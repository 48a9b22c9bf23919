"""The fields that every endpoint takes beside its own: how tokens are chosen, vLLM's, and ours.

What a chat knows as OpenAI's own, as `stop`, is vLLM's to a response.
"""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from schemas.structure import StructuredOutputs
from schemas.wire import SimHook

_INT64_MAX: Final = 2**63 - 1
STOPS_MAX: Final = 4
STOP_CHARACTERS_MAX: Final = 1024

Penalty = Annotated[float, Meta(ge=-2, le=2)]
Seed = Annotated[int, Meta(ge=-(2**63), le=_INT64_MAX)]
Tokens = Annotated[int, Meta(ge=1, le=_INT64_MAX)]
StopText = Annotated[str, Meta(min_length=1, max_length=STOP_CHARACTERS_MAX)]
Stop = StopText | Annotated[list[StopText], Meta(max_length=STOPS_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Bias = dict[str, Annotated[float, Meta(ge=-100, le=100)]]
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
MinP = Annotated[float, Meta(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=100)]
TokenIds = Annotated[list[TokenId], Meta(max_length=1024)]
BadWords = Annotated[list[StopText], Meta(max_length=128)]
Priority = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class Extras(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that all endpoints share."""

    seed: Seed | None = None
    stop: Stop | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Bias | None = None
    # vLLM's
    structured_outputs: StructuredOutputs | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=_INT64_MAX)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    bad_words: BadWords | None = None
    allowed_token_ids: TokenIds | None = None
    add_special_tokens: bool | None = None
    priority: Priority | None = None
    # Ours
    session_id: str | None = None
    on_disconnect: Literal["cancel", "continue"] | None = None
    sim: SimHook | None = None
    # Refused wherever they ask for something: see schemas.refused
    prompt_logprobs: Any = None
    logprob_token_ids: Any = None
    thinking_token_budget: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    truncate_prompt_tokens: Any = None
    truncation_side: Any = None
    return_token_ids: Any = None
    return_tokens_as_token_ids: Any = None
    return_token_offsets: Any = None
    return_prompt_text: Any = None
    routed_experts_prompt_start: Any = None
    repetition_detection: Any = None
    watermarking: Any = None
    stream_interval: Any = None
    vllm_xargs: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None
    mm_payload: Any = None
    return_mm_kwargs: Any = None
    cache_salt: Any = None
    request_id: Any = None
