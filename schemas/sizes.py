"""How large the members of a body may be. Rule: what is not a prompt is small, and looked at before
it is decoded.

Decoding makes a Python object of each value while every other client waits: of 16 MiB of a prompt's
text in 20 ms, of as much of `{"logit_bias": {"1": 1, …` in seconds. So a large body is first read
with its members left as they stand, which takes 2 ms a megabyte.
"""

from typing import Final

import msgspec

from schemas.errors import InvalidRequest, RequestTooLarge

MEMBER_BYTES_MAX: Final = 1024 * 1024
"""For each member but the prompt."""
PROMPTS_MAX: Final = 1024
"""So many lists of token ids are looked at, to say that one is served."""
Raw = msgspec.Raw


class _Members(msgspec.Struct, frozen=True):
    """The members that may hold lists and objects, on any endpoint, refused ones too; strings cost
    nothing."""

    prompt: Raw = Raw()
    access_programs: Raw = Raw()
    allowed_token_ids: Raw = Raw()
    audio: Raw = Raw()
    background_options: Raw = Raw()
    bad_words: Raw = Raw()
    cache_salt: Raw = Raw()
    chat_template: Raw = Raw()
    chat_template_kwargs: Raw = Raw()
    context_management: Raw = Raw()
    conversation: Raw = Raw()
    ec_transfer_params: Raw = Raw()
    echo: Raw = Raw()
    enable_response_messages: Raw = Raw()
    function_call: Raw = Raw()
    functions: Raw = Raw()
    image: Raw = Raw()
    include: Raw = Raw()
    kv_transfer_params: Raw = Raw()
    length_penalty: Raw = Raw()
    logit_bias: Raw = Raw()
    logprob_token_ids: Raw = Raw()
    media_io_kwargs: Raw = Raw()
    metadata: Raw = Raw()
    mm_payload: Raw = Raw()
    mm_processor_kwargs: Raw = Raw()
    modalities: Raw = Raw()
    moderation: Raw = Raw()
    prediction: Raw = Raw()
    previous_input_messages: Raw = Raw()
    prompt_cache_options: Raw = Raw()
    prompt_embeds: Raw = Raw()
    prompt_logprobs: Raw = Raw()
    reasoning: Raw = Raw()
    repetition_detection: Raw = Raw()
    request_id: Raw = Raw()
    response_format: Raw = Raw()
    return_mm_kwargs: Raw = Raw()
    return_prompt_text: Raw = Raw()
    return_token_ids: Raw = Raw()
    return_token_offsets: Raw = Raw()
    return_tokens_as_token_ids: Raw = Raw()
    routed_experts_prompt_start: Raw = Raw()
    sim: Raw = Raw()
    stop: Raw = Raw()
    stop_token_ids: Raw = Raw()
    stream_interval: Raw = Raw()
    stream_options: Raw = Raw()
    structured_outputs: Raw = Raw()
    text: Raw = Raw()
    thinking_token_budget: Raw = Raw()
    tool_choice: Raw = Raw()
    tools: Raw = Raw()
    truncate_prompt_tokens: Raw = Raw()
    truncation_side: Raw = Raw()
    use_beam_search: Raw = Raw()
    vllm_xargs: Raw = Raw()
    watermarking: Raw = Raw()
    web_search_options: Raw = Raw()


_decoder = msgspec.json.Decoder(_Members)


def check_sizes(body: bytes) -> None:
    """Refuse a large body for the members that make it large. Raises RequestTooLarge and
    InvalidRequest naming the member, and msgspec's own errors where it is no JSON object."""
    if len(body) <= MEMBER_BYTES_MAX:
        return
    members = _decoder.decode(body)
    for name in _Members.__struct_fields__:
        member = memoryview(getattr(members, name))
        # A prompt is one text or one list.
        large = b"{" if name == "prompt" else b"[{"
        if member.nbytes > MEMBER_BYTES_MAX and member[0] in large:
            what = f"'{name}' is over the limit of {MEMBER_BYTES_MAX} bytes."
            raise RequestTooLarge(what, param=name)
    prompt = bytes(members.prompt)
    if prompt[:1] == b"[" and b'"' not in prompt and prompt.count(b"[") > PROMPTS_MAX:
        raise InvalidRequest("One prompt per request is served.", param="prompt")
