"""Runs the load client and the engine alone, each in a process of its own, and what they send."""

import itertools
import json
import subprocess
import sys
from functools import cache
from typing import Any

import msgspec

from bench.plan import EnginePlan, Outcome, Plan
from bench.system import ROOT
from ingress.prompt import Prompter
from schemas.openai import ChatMessage
from workers.sim.vocabulary import tokenizer_files


class LoadFailed(Exception):
    """The load client or the engine alone gave up; the message says why."""


def load(plan: Plan) -> Outcome:
    """Run the load client. Raises LoadFailed."""
    return _run("bench.client", plan)


def engine_alone(plan: EnginePlan) -> Outcome:
    """Run the engine with an emit that only counts. Raises LoadFailed."""
    return _run("bench.engine", plan)


def _run(module: str, plan: Plan | EnginePlan) -> Outcome:
    done = subprocess.run(
        [sys.executable, "-m", module],
        input=msgspec.json.encode(plan),
        capture_output=True,
        cwd=ROOT,
        timeout=180,
    )
    if done.returncode:
        raise LoadFailed(done.stderr.decode()[-2000:])
    try:
        return msgspec.json.decode(done.stdout, type=Outcome)
    except msgspec.DecodeError as error:
        raise LoadFailed(f"{module} ended without an outcome: {done.stderr!r}") from error


def chat(
    content: str, *, tokens: int, model: str = "sim", stream: bool = True, **more: Any
) -> dict[str, Any]:
    """Return a chat request for exactly so many tokens."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": stream,
        **more,
    }


def bodies(count: int, *, prompt: str = "Tell me about river {}.", **more: Any) -> list[str]:
    """Return requests with prompts that differ, as JSON."""
    return [json.dumps(chat(prompt.format(index), **more)) for index in range(count)]


@cache
def prompt_of(tokens: int) -> str:
    """Return a prompt of about so many tokens with a place for a number at its beginning."""
    prompter = Prompter(tokenizer_files())
    text = "Number {}:"
    words = itertools.cycle(["the", "river", "carries", "water", "to", "a", "mill", "and", "on"])
    while len(prompter.chat([ChatMessage("user", text)], None)) < tokens:
        text += " " + next(words)
    return text


@cache
def prompt_tokens() -> tuple[int, ...]:
    """Return the token ids of a short prompt."""
    return tuple(
        Prompter(tokenizer_files()).chat([ChatMessage("user", "Tell me about river 1.")], None)
    )
