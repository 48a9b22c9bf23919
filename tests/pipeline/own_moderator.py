"""A moderator as an operator might write one: it is asked over a network, as it were, which may
break."""

import asyncio

from headrace.moderation import Asked, Said


class OwnModerator:
    """Lets no `word` pass; fails at `breaking`, and hangs at `hanging`."""

    def __init__(self, word: str) -> None:
        self._word = word

    async def check_input(self, asked: Asked) -> bool:
        text = " ".join(asked.texts)
        await self._ask(text)
        return self._word in text

    async def check_output(self, said: Said) -> int | None:
        await self._ask(said.text)
        found = said.text.find(self._word)
        return None if found < 0 else found

    async def _ask(self, text: str) -> None:
        if "breaking" in text:
            raise OSError(f"cannot send {text}")
        await asyncio.sleep(60 if "hanging" in text else 0)


def make(options: dict[str, str]) -> OwnModerator:
    return OwnModerator(options["word"])
