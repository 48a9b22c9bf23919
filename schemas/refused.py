"""Fields that we know and cannot serve. Rule: who asks for one is told so, by its name.

`null` and `false` ask for nothing. The rest of what a body may hold, unknown to us, has no effect.
"""

from collections.abc import Mapping
from typing import Any, Final

from schemas.errors import InvalidRequest

SHARED: Final = {
    "prompt_logprobs": "Log probabilities of the prompt are not served.",
    "use_beam_search": "Beam search is not served.",
    "truncate_prompt_tokens": "Prompts are not cut: shorten the prompt.",
    "return_token_ids": "Token ids are not served.",
    "return_tokens_as_token_ids": "Token ids are not served.",
}
CHAT: Final = SHARED | {
    "audio": "Audio is not served.",
    "moderation": "Moderation is the operator's affair, not a request's.",
    "web_search_options": "Web search is not served.",
    "functions": "'functions' is not served: use 'tools'.",
    "function_call": "'function_call' is not served: use 'tool_choice'.",
    "chat_template": "A template of the request's own is not served.",
    "echo": "'echo' is served by completions only.",
    "logprob_token_ids": "Log probabilities of chosen tokens are not served.",
    "thinking_token_budget": "A budget of reasoning tokens is not served.",
}
COMPLETION: Final = SHARED | {
    "suffix": "'suffix' is not served.",
    "prompt_embeds": "Embeddings in place of a prompt are not served.",
}

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


def _check(request: Any, reasons: Mapping[str, str]) -> None:
    for name, reason in reasons.items():
        value = getattr(request, name)
        if value is not None and value is not False and value != "":
            raise InvalidRequest(reason, param=name)
