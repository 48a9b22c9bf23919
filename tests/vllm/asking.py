"""The same requests for vLLM's own server and for ours, and what an answer says."""

import json
from typing import Any

import httpx

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
ONE_OF_TWO = CITY | {"properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}}}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": CITY,
        "strict": True,
    },
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": user(text), "temperature": 0, "max_tokens": 16} | more


def completion(prompt: Any, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "temperature": 0, "max_tokens": 12} | more


PARIS = "What is the capital of France?"
WEATHER_IN_PARIS = "What is the weather in Paris?"
HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "And the weather?"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
]

REQUESTS: dict[str, dict[str, Any]] = {
    "plain": chat(PARIS),
    "unicode": chat("Grüße auf Deutsch und mit 🙂, bitte."),
    "length": chat("Tell me a story.", max_tokens=5),
    "stop string": chat(PARIS, stop=["France"]),
    "stop string kept": chat(PARIS, stop=["France"], include_stop_str_in_output=True),
    "stop token": chat(PARIS, stop_token_ids=[28]),
    "ignore_eos": chat(PARIS, ignore_eos=True),
    "min_tokens": chat(PARIS, min_tokens=14),
    "special tokens": chat(PARIS, skip_special_tokens=False, ignore_eos=True, max_tokens=14),
    "repetition": chat("Tell me a story.", repetition_penalty=1.3),
    "penalties": chat("Tell me a story.", presence_penalty=0.7, frequency_penalty=0.6),
    "bias": chat(PARIS, logit_bias={"28": 5}),
    "bad words": chat(PARIS, bad_words=["Paris"]),
    "allowed tokens": chat(PARIS, allowed_token_ids=[28, 30, 2], max_tokens=6),
    "two choices": chat("Tell me a story.", n=2, temperature=1, seed=3, max_tokens=12),
    "top_k and min_p": chat(PARIS, temperature=1, seed=1, top_k=5, min_p=0.1, top_p=0.9),
    "history": {"messages": HISTORY, "temperature": 0, "max_tokens": 16},
    "continued": chat(PARIS)
    | {
        "messages": [*user(PARIS), {"role": "assistant", "content": "The capital of"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "log probabilities": chat(PARIS, logprobs=True, top_logprobs=2),
    "json object": chat("Give me JSON.", response_format={"type": "json_object"}, max_tokens=20),
    "json schema": chat("Ann is 41 years old. Who?", response_format=SCHEMA, max_tokens=64),
    "choice": chat(PARIS, structured_outputs={"choice": ["Paris", "Rome"]}),
    "regex": chat("When?", structured_outputs={"regex": r"\d{4}-\d{2}"}),
    "named tool": chat(WEATHER_IN_PARIS, tools=[WEATHER], tool_choice=NAMED, max_tokens=64),
    "required tool": chat(WEATHER_IN_PARIS, tools=[WEATHER], tool_choice="required", max_tokens=64),
    "auto tool": chat(WEATHER_IN_PARIS, tools=[WEATHER]),
    "no tool": chat(WEATHER_IN_PARIS, tools=[WEATHER], tool_choice="none"),
    "completion": completion("Once upon a time there was"),
    "completion of ids": completion([504, 35, 282]),
    "completion echoed": completion("Once upon a time there was", echo=True),
    "completion stopped": completion("Once upon a time there was", stop=["."]),
    "completion log probabilities": completion("Once upon a time", logprobs=2),
    "completion with a form": completion("Age:", structured_outputs={"regex": r" \d\d"}),
}


def path_of(body: dict[str, Any]) -> str:
    return "/v1/completions" if "prompt" in body else "/v1/chat/completions"


def collect(client: httpx.Client, model: str, body: dict[str, Any]) -> dict[str, Any]:
    """Ask for a whole answer."""
    answer = client.post(path_of(body), json={"model": model} | body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def stream(client: httpx.Client, model: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Ask for a stream, and return its chunks."""
    asked = {"model": model, "stream": True, "stream_options": {"include_usage": True}} | body
    with client.stream("POST", path_of(body), json=asked) as answer:
        answer.read()
    assert answer.status_code == 200, answer.text
    assert answer.text.endswith("data: [DONE]\n\n")
    return parsed_events(answer.text)


def parsed_events(text: str) -> list[dict[str, Any]]:
    """Return the objects of a stream's events."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line[:6] == "data: "]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a stream said, in the form of `said`."""
    choices: dict[int, dict[str, Any]] = {}
    for part in (part for chunk in chunks for part in chunk["choices"]):
        empty: dict[str, Any] = {"text": "", "reasoning": "", "reason": None, "calls": {}}
        choice = choices.setdefault(part["index"], empty | {"tokens": []})
        delta = part.get("delta", {})
        choice["tokens"] += tokens_of(part)
        choice["reasoning"] += delta.get("reasoning") or ""
        choice["text"] += part.get("text") or delta.get("content") or ""
        choice["reason"] = part["finish_reason"] or choice["reason"]
        for call in delta.get("tool_calls") or ():
            name, arguments = choice["calls"].get(call["index"], ("", ""))
            name += call["function"].get("name") or ""
            arguments += call["function"].get("arguments") or ""
            choice["calls"][call["index"]] = (name, arguments)
    return _said([choices[index] for index in sorted(choices)], chunks[-1]["usage"])


def said(answer: dict[str, Any]) -> dict[str, Any]:
    """Return what an answer says: texts, tool calls, reasons and usage, without ids and times."""
    choices = []
    for part in answer["choices"]:
        message = part.get("message", {})
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        choices.append(
            {
                "text": part.get("text") or message.get("content") or "",
                "reasoning": message.get("reasoning") or "",
                "reason": part["finish_reason"],
                "calls": {n: (c["name"], c["arguments"]) for n, c in enumerate(calls)},
                "tokens": tokens_of(part),
            }
        )
    return _said(choices, answer["usage"])


def tokens_of(part: dict[str, Any]) -> list[str]:
    """Return the tokens of which log probabilities tell, of a chat's choice."""
    return [token["token"] for token in (part.get("logprobs") or {}).get("content") or ()]


def meant(found: dict[str, Any]) -> dict[str, Any]:
    """Return what `said` says with the arguments of tool calls read as JSON.

    vLLM's server writes them anew where it does not stream; ours sends what the model wrote.
    """
    choices = [
        choice
        | {"calls": {n: (name, json.loads(text)) for n, (name, text) in choice["calls"].items()}}
        for choice in found["choices"]
    ]
    return found | {"choices": choices}


def is_cut(found: dict[str, Any]) -> bool:
    """Whether a tool call was cut off: vLLM's server shows it as text where it does not stream."""
    return any(choice["calls"] and choice["reason"] == "length" for choice in found["choices"])


def _said(choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "choices": choices,
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "reasoning_tokens": (usage.get("completion_tokens_details") or {}).get("reasoning_tokens"),
    }
