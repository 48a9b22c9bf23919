"""Fields that we know and cannot serve. Rule: who asks for one is told so, by its name.

`null`, `false` and vLLM's own defaults ask for nothing. The rest of what a body may hold, unknown
to us, has no effect.
"""

from collections.abc import Mapping
from typing import Any, Final

from schemas.errors import InvalidRequest

_CUT: Final = "Prompts are not cut: shorten the prompt."
_IDS: Final = "Token ids are not served."
_TEXT: Final = "Only text is served."
_TRANSFERS: Final = "Transfers between engines are the operator's affair, not a request's."

SHARED: Final = {
    "prompt_logprobs": "Log probabilities of the prompt are not served.",
    "logprob_token_ids": "Log probabilities of chosen tokens are not served.",
    "thinking_token_budget": "A budget of reasoning tokens is not served.",
    "use_beam_search": "Beam search is not served.",
    "length_penalty": "Beam search is not served.",
    "truncate_prompt_tokens": _CUT,
    "truncation_side": _CUT,
    "return_token_ids": _IDS,
    "return_tokens_as_token_ids": _IDS,
    "return_token_offsets": "Offsets of tokens are not served.",
    "return_prompt_text": "The rendered prompt is not served.",
    "routed_experts_prompt_start": "Routed experts are not served.",
    "repetition_detection": "Ends by repetition are not served.",
    "watermarking": "Watermarks are not a request's to set.",
    "stream_interval": "How many tokens an event holds is not a request's to set.",
    "vllm_xargs": "Arguments of an engine's extensions are not served.",
    "kv_transfer_params": _TRANSFERS,
    "ec_transfer_params": _TRANSFERS,
    "media_io_kwargs": _TEXT,
    "mm_processor_kwargs": _TEXT,
    "mm_payload": _TEXT,
    "return_mm_kwargs": _TEXT,
    "cache_salt": "Who shares prefixes is the operator's affair, not a request's.",
    "request_id": "Requests are named here: the answer's 'x-request-id' tells.",
}
CHAT: Final = SHARED | {
    "audio": "Audio is not served.",
    "moderation": "Moderation is the operator's affair, not a request's.",
    "web_search_options": "Web search is not served.",
    "functions": "'functions' is not served: use 'tools'.",
    "function_call": "'function_call' is not served: use 'tool_choice'.",
    "chat_template": "A template of the request's own is not served.",
    "echo": "'echo' is served by completions only.",
}
COMPLETION: Final = SHARED | {
    "suffix": "'suffix' is not served.",
    "prompt_embeds": "Embeddings in place of a prompt are not served.",
}
RESPONSE: Final = CHAT | {
    "access_programs": "'access_programs' is not served.",
    "background_options": "'background_options' is not served.",
    "context_management": "Conversations are not compacted: shorten the input.",
    "conversation": "Conversations are not served: use 'previous_response_id'.",
    "image": "'image' is not served.",
    "prompt": "Prompt templates are not served: use 'input'.",
    "enable_response_messages": "Messages as the engine has them are not served.",
    "previous_input_messages": "Messages as the engine has them are not served.",
}
DEFAULTS: Final = {"length_penalty": 1, "mm_payload": "tensors", "routed_experts_prompt_start": 0}
"""With these values vLLM does nothing either."""

RESERVED_VARIABLES: Final = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("chat_template", "tokenize", "raise_exception", "strftime_now"),
    }
)
"""Variables of a chat template that have fields of their own, or are no client's to set."""


def check_chat(request: Any) -> None:
    """Refuse what a chat request asks for and cannot have. Raises InvalidRequest."""
    _check(request, CHAT)
    if request.modalities not in (None, ["text"]):
        raise InvalidRequest("Only the modality 'text' is served.", param="modalities")
    for name in sorted(RESERVED_VARIABLES & (request.chat_template_kwargs or {}).keys()):
        raise InvalidRequest(
            f"'chat_template_kwargs' cannot set '{name}'.", param=f"chat_template_kwargs.{name}"
        )


def check_completion(request: Any) -> None:
    """Refuse what a completion request asks for and cannot have. Raises InvalidRequest."""
    _check(request, COMPLETION)


def check_response(request: Any) -> None:
    """Refuse what a response cannot have. Raises InvalidRequest.

    What a chat cannot have beside these fields is refused where it is made a chat.
    """
    _check(request, RESPONSE)


def _check(request: Any, reasons: Mapping[str, str]) -> None:
    for name, reason in reasons.items():
        value = getattr(request, name)
        nothing = value is None or value is False or value in ("", DEFAULTS.get(name))
        if not nothing:
            raise InvalidRequest(reason, param=name)
