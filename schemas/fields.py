"""What becomes of each field of a request, in one sentence: the API's description quotes it.

docs/api.md says the same in tables, which a test holds to this list. Fields that are refused have
their sentences in `schemas.refused`; what is in neither list has no effect.
"""

from typing import Final

NO_EFFECT: Final = "Taken, and without effect."
CACHE: Final = {
    "prompt_cache_options": NO_EFFECT + " Prefixes are cached by themselves.",
    "prompt_cache_retention": NO_EFFECT + " Prefixes are cached by themselves.",
}

SHARED: Final = {
    "model": "The model's name; an unknown one is 404.",
    "max_tokens": "The most tokens of each choice; without it, all that the context has room for.",
    "temperature": "0 to 2; without it, the model's own default.",
    "top_p": "Above 0, at most 1; without it, the model's own default.",
    "seed": "Repeats an answer, where the engine can.",
    "stop": "Up to 4 texts that end an answer and are not part of it.",
    "n": "How many choices, 1 to 128; with vLLM only one at temperature 0.",
    "presence_penalty": "-2 to 2.",
    "frequency_penalty": "-2 to 2.",
    "logit_bias": "By token id, -100 to 100.",
    "stream": "Whether the answer comes as server-sent events.",
    "stream_options": "Needs `stream`; `include_usage`, and our `include_event_ids`.",
    "user": NO_EFFECT,
    "prompt_cache_key": "Names a session: requests of one session go to one worker.",
    "safety_identifier": NO_EFFECT,
    "metadata": "Up to 16 texts of 512 characters. " + NO_EFFECT,
    "store": NO_EFFECT,
    "service_tier": "`auto` or `default`, without effect; others are refused.",
    "response_format": "`text`, `json_object`, `json_schema` or vLLM's `structural_tag`.",
    "structured_outputs": "vLLM's: one of json, json_object, regex, choice, grammar,"
    " structural_tag.",
    "top_k": "vLLM's: -1 or 0 for all.",
    "min_p": "vLLM's: 0 to 1.",
    "repetition_penalty": "vLLM's: above 0.",
    "min_tokens": "vLLM's: no end before so many tokens.",
    "ignore_eos": "vLLM's: the answer goes on to its bound.",
    "stop_token_ids": "vLLM's: token ids that end an answer.",
    "include_stop_str_in_output": "vLLM's: what ended an answer is part of it.",
    "skip_special_tokens": "vLLM's: default true.",
    "spaces_between_special_tokens": "vLLM's: default true.",
    "bad_words": "vLLM's: words that are not said.",
    "allowed_token_ids": "vLLM's: no other tokens.",
    "add_special_tokens": "vLLM's: default false for chats, true for completions.",
    "priority": "vLLM's: lower is sooner, but none below the default, 0.",
    "session_id": "Ours: as `prompt_cache_key`, and wins over it.",
    "on_disconnect": "Ours: `continue` lets the request run on when its client leaves.",
    "sim": "Ours: the simulated engine's test hook.",
}

CHAT: Final = SHARED | {
    "prediction": NO_EFFECT + " The answer is the same, and comes no sooner.",
    **CACHE,
    "messages": "At least one, of the roles system, developer, user, assistant, tool; text only.",
    "max_completion_tokens": "As `max_tokens`, and wins over it.",
    "logprobs": "Whether to report log probabilities.",
    "top_logprobs": "0 to 20 likeliest tokens each; needs `logprobs`.",
    "tools": "Up to 128 functions; needs workers with a tool parser.",
    "tool_choice": "`none`, `auto` (the default with tools), `required`, or a named function.",
    "parallel_tool_calls": "False leaves one call.",
    "reasoning_effort": "For the chat template; sets its `enable_thinking` too, as vLLM does.",
    "verbosity": "For the chat template.",
    "modalities": "`text` only.",
    "include_reasoning": "vLLM's: false leaves reasoning out.",
    "add_generation_prompt": "vLLM's: default true.",
    "continue_final_message": "vLLM's: the answer continues the last message.",
    "chat_template_kwargs": "vLLM's: further variables for the chat template.",
    "documents": "vLLM's: for the chat template.",
}

COMPLETION: Final = SHARED | {
    "max_tokens": "The most tokens of each choice; without it 16.",
    "prompt": "One text, or one list of token ids.",
    "logprobs": "0 to 5 likeliest tokens each, and the chosen one.",
    "echo": "The prompt stands before each choice; without log probabilities only.",
    "best_of": "Equal to `n` only.",
}

AS_IN_A_CHAT: Final = (
    *("seed", "stop", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("structured_outputs", "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos"),
    *("stop_token_ids", "include_stop_str_in_output", "skip_special_tokens"),
    *("spaces_between_special_tokens", "bad_words", "allowed_token_ids", "add_special_tokens"),
    *("priority", "session_id", "on_disconnect", "sim", "include_reasoning"),
    *("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "documents"),
)
"""What a response is asked with in the words of a chat."""

RESPONSE: Final = {
    "model": SHARED["model"],
    "input": "A text, or items: messages, function calls and their outputs, reasoning; text only.",
    "instructions": "A system message before the input; not carried over to the next response.",
    "previous_response_id": "A stored response that this one goes on from.",
    "background": "Whether the answer comes at once, `queued`, and the response runs on by itself.",
    "store": "Whether the response can be retrieved, for 24 hours; default true.",
    "stream": SHARED["stream"],
    "stream_options": "Needs `stream`; our `include_event_ids`.",
    "generate": "On a WebSocket only: false prepares a response without running it.",
    "include": "`message.output_text.logprobs`; what OpenAI's own tools make has no effect.",
    "max_output_tokens": "The most tokens of the answer, reasoning too.",
    "max_tool_calls": "Repeated in the object; only OpenAI's own tools are counted.",
    "metadata": "Up to 16 texts of 512 characters, repeated in the object.",
    "parallel_tool_calls": "False leaves one call.",
    "personality": NO_EFFECT + " OpenAI knows it in counts of tokens alone.",
    "prompt_cache_key": SHARED["prompt_cache_key"],
    **CACHE,
    "reasoning": "`effort`, for the chat template; no summaries.",
    "safety_identifier": "Repeated in the object.",
    "service_tier": SHARED["service_tier"],
    "temperature": SHARED["temperature"],
    "text": "`format` as `response_format` in a chat, and `verbosity`.",
    "tool_choice": "`none`, `auto` (the default with tools), `required`, or a named function.",
    "tools": "Functions; needs workers with a tool parser.",
    "top_logprobs": "0 to 20 likeliest tokens each.",
    "top_p": SHARED["top_p"],
    "truncation": "`disabled` only.",
    "user": "Repeated in the object.",
    **{name: CHAT[name] for name in AS_IN_A_CHAT},
}
