"""How requests are looked at, however large they are."""

import asyncio
import json

from ingress.admit import parse
from ingress.catalogue import Model
from ingress.inspection import Inspection
from ingress.prompt import Prompter
from ingress.prompt_log import PromptLog
from schemas.model import ModelCard
from schemas.tenant import Policy
from workers.sim.vocabulary import tokenizer_files


def test_others_go_on_while_a_large_request_is_looked_at() -> None:
    card = ModelCard(name="m", created_s=0, max_model_len=1000, files={})
    model = Model(card, Prompter(tokenizer_files()))
    messages = [{"role": "user", "content": "u"}]
    documents = [{"a": ["b"] * 20_000}]
    body = json.dumps({"model": "m", "messages": messages, "documents": documents}).encode()
    ask = parse(body, chat=True)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def scenario() -> None:
        inspection = Inspection(None, PromptLog(redact=(), characters_max=10))
        going_on = asyncio.create_task(others())
        await inspection.look("r", "t", Policy(), ask, model, body_bytes=len(body))
        going_on.cancel()

    asyncio.run(scenario())
    assert turns
