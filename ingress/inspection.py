"""What is done with what a client says, where the operator asks for it: a moderator decides, and a
line is logged. Rule: before anything is reserved or queued; a refusal does not repeat the text."""

import asyncio
import os
import re
from collections.abc import Mapping

from headrace.moderation import (
    INLINE_CHARACTERS_MAX,
    Asked,
    Moderation,
    ModeratorFailed,
    moderation_of,
)
from headrace.patterns import compile_patterns
from headrace.settings import BadSetting, ConfigFile
from ingress.catalogue import Model
from ingress.prompt_log import PromptLog
from ingress.texts import texts_of
from schemas.errors import ContentPolicyViolation, ModerationUnavailable
from schemas.openai import ChatRequest, CompletionRequest
from schemas.tenant import Policy


class Inspection:
    """Looks at requests; one per process, and none where nothing is asked for."""

    def __init__(self, moderation: Moderation | None, prompts: PromptLog | None) -> None:
        self.moderation = moderation
        self._prompts = prompts

    async def look(
        self,
        request: str,
        tenant: str,
        policy: Policy,
        ask: ChatRequest | CompletionRequest,
        model: Model,
        *,
        body_bytes: int,
    ) -> None:
        """Look at a request, read from a body of this size. Raises ContentPolicyViolation and
        ModerationUnavailable."""
        moderation = self.moderation if policy.moderation else None
        if moderation is None and self._prompts is None:
            return
        texts = await _texts(ask, model, body_bytes)
        name = model.card.name
        try:
            if moderation is not None:
                await _moderate(moderation, Asked(tenant, name, texts), ask)
        except (ContentPolicyViolation, ModerationUnavailable) as refusal:
            if self._prompts is not None:
                code = refusal.code or ""
                self._prompts.refused(request=request, tenant=tenant, model=name, code=code)
            raise
        if self._prompts is not None:
            self._prompts.write(request=request, tenant=tenant, model=name, texts=texts)


async def _texts(
    ask: ChatRequest | CompletionRequest, model: Model, body_bytes: int
) -> tuple[str, ...]:
    """Return the texts of a request; those of a large one in a thread: the others must not wait.

    16 MiB of documents are some million strings, whatever the template makes of them: 3 s.
    """
    if body_bytes <= INLINE_CHARACTERS_MAX:
        return texts_of(ask, model.prompter)
    return await asyncio.to_thread(texts_of, ask, model.prompter)


async def _moderate(
    moderation: Moderation, asked: Asked, ask: ChatRequest | CompletionRequest
) -> None:
    try:
        refused = await moderation.refuses(asked)
    except ModeratorFailed:
        what = "The request could not be checked by this service's moderator."
        raise ModerationUnavailable(what) from None
    if refused:
        param = "messages" if isinstance(ask, ChatRequest) else "prompt"
        raise ContentPolicyViolation(
            "The request was refused by this service's content policy.", param=param
        )


def inspection_of(
    config: ConfigFile, *, log_prompts: bool, environ: Mapping[str, str] = os.environ
) -> Inspection | None:
    """Return what the settings ask for, None for nothing. Raises BadSetting."""
    content = config.content
    wanted = content.moderation
    try:
        moderation = moderation_of(wanted) if wanted and wanted.looks_at_requests else None
    except ValueError as error:
        raise BadSetting(f"{config.path}: {error}") from error
    prompts = None
    if log_prompts or content.logging.prompts:
        own = environ.get("HEADRACE_API_KEY")
        patterns = compile_patterns(content.logging.redact)
        prompts = PromptLog(
            redact=(*patterns, *([re.compile(re.escape(own))] if own else [])),
            characters_max=content.logging.prompt_characters,
        )
    return Inspection(moderation, prompts) if moderation or prompts else None
