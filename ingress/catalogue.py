"""The models that can be asked for: each card with the means to render its prompts."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from headrace import topology
from headrace.bus import BrokerAway, BrokerRefused, Bus
from headrace.registry import Registry, load_files
from ingress.prompt import Prompter, UnusableFiles
from schemas import subjects
from schemas.errors import BrokerUnavailable, ModelNotFound
from schemas.model import ModelCard
from schemas.tenant import UNLIMITED, Policy

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Model:
    """A served model."""

    card: ModelCard
    prompter: Prompter


class Catalogue:
    """Follows the registry of models; run `follow` as a task."""

    def __init__(self, bus: Bus, *, clock: Callable[[], float]) -> None:
        self._bus = bus
        self._models: dict[str, Model] = {}
        self._unusable: dict[str, str] = {}
        self._broken: set[str] = set()  # whose files are there and of no use
        self._changed = asyncio.Event()
        self._registry = Registry(
            bus,
            subjects.MODELS,
            ModelCard,
            ttl_s=topology.MODEL_TTL_S,
            clock=clock,
            on_change=self._changed.set,
        )

    def find(self, name: str, policy: Policy = UNLIMITED) -> Model:
        """Return a model. Raises ModelNotFound, for one that the policy does not allow as well, and
        BrokerUnavailable for one whose files could not be read yet."""
        model = self._models.get(name)
        if model is None or not policy.allows(name):
            coming = name in self._registry.entries and name not in self._broken
            if coming and policy.allows(name):
                raise BrokerUnavailable("The model's files cannot be read yet; try again.")
            raise ModelNotFound(f"The model '{name[:100]}' does not exist.", param="model")
        return model

    def cards(self) -> list[ModelCard]:
        """Return all cards, by name."""
        return [self._models[name].card for name in sorted(self._models)]

    async def start(self) -> None:
        """Read the registry and load what it names. Raises BrokerAway and BrokerRefused."""
        await self._registry.start()
        await self._load()

    async def follow(self) -> None:
        """Load models as they come, forget them as they go, try again what failed; for ever."""
        while True:
            self._registry.tick()
            try:
                async with asyncio.timeout(topology.HEARTBEAT_S):
                    await self._changed.wait()
            except TimeoutError:
                if not self._unusable:
                    continue
            self._changed.clear()
            await self._load()

    async def _load(self) -> None:
        cards = self._registry.entries
        unusable, self._unusable = self._unusable, {}
        for name in self._models.keys() - cards.keys():
            log.info("model %s is no longer served", name)
            del self._models[name]
        for name, card in cards.items():
            known = self._models.get(name)
            if known is not None and known.card.files == card.files:
                self._models[name] = Model(card, known.prompter)
                continue
            try:
                files = await load_files(self._bus, card)
                prompter = await asyncio.to_thread(Prompter, files)
            except (BrokerAway, BrokerRefused, UnusableFiles) as error:
                self._unusable[name] = str(error)  # its files may be put back
                if isinstance(error, UnusableFiles):
                    self._broken.add(name)
                if unusable.get(name) != str(error):
                    log.warning("model %s cannot be served: %s", name, error)
                continue
            self._models[name] = Model(card, prompter)
            self._broken.discard(name)
            log.info("model %s: context %d", name, card.max_model_len)
