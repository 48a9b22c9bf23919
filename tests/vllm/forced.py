"""Requests whose answers have a form that parsers of tool calls and of reasoning must tell apart.

A small model says nothing of the kind by itself; a regular expression leaves it no choice.
"""

import re
from typing import Any

from tests.vllm.asking import NAMED, ONE_OF_TWO, PARIS, WEATHER, WEATHER_IN_PARIS, chat

SURE: dict[str, Any] = {
    "type": "function",
    "function": WEATHER["function"] | {"parameters": ONE_OF_TWO},
}
FORM = {"type": "json_schema", "json_schema": {"name": "city", "schema": ONE_OF_TWO}}
NO_FORM = {"structured_outputs": None}
LOOSE: dict[str, Any] = {
    "type": "function",
    "function": {name: value for name, value in WEATHER["function"].items() if name != "strict"},
}
"""The same function without `strict`: its calls have no grammar of their own."""


def call(city: str = "(Paris|Rome)") -> str:
    """Return an expression for a call as Hermes models write it."""
    start, end = r'\{"name": "get_weather", "arguments": \{"city": "', r'"\}\}'
    return rf"<tool_call>\n{start}{city}{end}\n</tool_call>"


def forced(regex: str, **more: Any) -> dict[str, Any]:
    """Return a chat in which a tool may be called, and whose answer has this form."""
    form = {"structured_outputs": {"regex": regex}}
    return chat(WEATHER_IN_PARIS, tools=[LOOSE], max_tokens=96, **form) | more


def parts(*texts: str) -> list[dict[str, Any]]:
    """Return content of several parts."""
    return [{"type": "text", "text": text} for text in texts]


CALLS: dict[str, dict[str, Any]] = {
    "a call": forced(call()),
    "a call that is chosen": forced(call(), tool_choice="auto"),
    "a call of a strict function": forced(call(), tools=[WEATHER]),
    "text before a call": forced(r"Well, I look\. " + call()),
    "two calls": forced(call() + r"\n" + call("[A-Z][a-z]{2,6}")),
    "two calls where one may be": forced(call() + r"\n" + call(), parallel_tool_calls=False),
    "calls of two choices": forced(call(), n=2, temperature=1, seed=4),
    "no call": forced(r"It rains in (Paris|Rome)\."),
    "nearly a call": forced(r"a <tool b <tool_cal c"),
    "a call that is none": forced(call(), tool_choice="none"),
    "a call that is cut": forced(call(), max_tokens=20),
    "a call with log probabilities": forced(call(), logprobs=True, top_logprobs=1),
    "text and a call with log probabilities": forced(r"So: " + call(), logprobs=True),
    "nearly a call with log probabilities": forced(r"a <tool b <tool_", logprobs=True),
}
BROKEN: dict[str, dict[str, Any]] = {
    "a call that is no JSON": forced(re.sub(r'"\(.*\)"', "Paris", call())),
    "an open call": forced(call().removesuffix(r"\n</tool_call>")),
}
"""Calls that vLLM's own server reads otherwise where it does not stream."""
HELD = ("nearly a call with log probabilities", "a call that is cut")
"""Answers whose end vLLM's own server loses where it streams: it might have become a call."""

PARTED: dict[str, dict[str, Any]] = {
    "parts": chat("") | {"messages": [{"role": "user", "content": parts("One.", "Two.")}]},
    "parts of every role": chat("")
    | {
        "messages": [
            {"role": "system", "content": parts("Be", "brief.")},
            {"role": "user", "content": parts("One.", "", "Two.")},
            {"role": "assistant", "content": parts("Three.", "Four.")},
            {"role": "tool", "tool_call_id": "call_1", "content": parts("five", "six")},
            {"role": "user", "content": "And?"},
        ]
    },
    "one part": chat("") | {"messages": [{"role": "user", "content": parts("One.")}]},
    "parts that are continued": chat("")
    | {
        "messages": [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": parts("The capital", "of")},
        ],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "a developer": chat("")
    | {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "One."},
            {"role": "developer", "content": parts("Be", "kind.")},
            {"role": "user", "content": "Two."},
        ]
    },
}


def thought(regex: str, **more: Any) -> dict[str, Any]:
    """Return a chat whose answer has this form once the model has thought."""
    return forced(regex, max_tokens=160) | more


THOUGHTS: dict[str, dict[str, Any]] = {
    "thoughts and an answer": thought(r"(Paris|Rome)\."),
    "thoughts without tools": chat(PARIS, max_tokens=96, structured_outputs={"choice": ["Paris"]}),
    "thoughts and an object": chat(PARIS, response_format=FORM, max_tokens=128),
    "thoughts that are cut": thought(r"(Paris|Rome)\.", max_tokens=5),
    "thoughts and a call": thought(call()),
    "thoughts and two calls": thought(call() + r"\n" + call()),
    "thoughts and a named call": thought("", tools=[SURE], tool_choice=NAMED, **NO_FORM),
    "thoughts and a required call": thought("", tools=[SURE], tool_choice="required", **NO_FORM),
    "thoughts that are left out": thought(r"(Paris|Rome)\.", include_reasoning=False),
    "no thoughts": thought(r"(Paris|Rome)\.", reasoning_effort="none"),
    "thoughts with log probabilities": thought(r"(Paris|Rome)\.", logprobs=True, top_logprobs=1),
    "thoughts and a call with log probabilities": thought(call(), logprobs=True),
    "thoughts of two choices": thought(r"(Paris|Rome)\.", n=2, temperature=1, seed=4),
    "earlier thoughts": thought(r"(Paris|Rome)\.")
    | {
        "messages": [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hi", "reasoning_content": "A greeting."},
            {"role": "user", "content": WEATHER_IN_PARIS},
        ]
    },
} | {
    name: body | {"max_tokens": 96, "structured_outputs": {"choice": ["Yes."]}}
    for name, body in PARTED.items()
    if name != "one part"
}


def bad(*, thinking: tuple[int, int]) -> dict[str, dict[str, Any]]:
    """Return requests whose answers must not go on; `thinking` are the ids of two words that make
    up what the model thinks."""
    return {
        "a bad call": thought(call("Oslo")),
        "a bad call with log probabilities": thought(call("Oslo"), logprobs=True),
        "a bad answer": thought(r"It rains in Oslo and in Rome\."),
        "bad thoughts": chat(
            WEATHER_IN_PARIS, allowed_token_ids=thinking, temperature=1, seed=1, max_tokens=40
        ),
    }
