"""Which engine runs, made from settings; and a model's card without one."""

import time
from typing import NamedTuple

from headrace.settings import BadSetting, EngineKind, EngineSettings
from schemas.model import ModelCard
from workers.card import NoModel, parser_names, read_model_files, served_name
from workers.engine import Engine
from workers.engine_sim import SimulatedEngine
from workers.sim.options import BadOption
from workers.sim.vocabulary import tokenizer_files


class ModelSource(NamedTuple):
    """A model's card, and its tokenizer files by name."""

    card: ModelCard
    files: dict[str, bytes]


def make_engine(settings: EngineSettings) -> Engine:
    """Return the engine that the settings name, not yet started. Raises BadSetting."""
    args = settings.engine_args.values
    if settings.engine is EngineKind.SIM:
        return _simulated(settings)
    from workers.engine_vllm import VllmEngine  # seconds, and not installed everywhere

    return VllmEngine(
        _model(settings), served_model_name=settings.served_model_name, engine_args=args
    )


def read_source(settings: EngineSettings) -> ModelSource:
    """Return the model's card and files without starting its engine. Raises BadSetting."""
    if settings.engine is EngineKind.SIM:
        return ModelSource(_simulated(settings).card(), tokenizer_files())
    model = _model(settings)
    args = settings.engine_args.values
    try:
        found = read_model_files(model, args)
    except NoModel as error:
        raise BadSetting(str(error)) from error
    name = settings.served_model_name or served_name(model, args)
    parsers = parser_names(args)
    card = ModelCard(
        name=name,
        created_s=int(time.time()),
        max_model_len=found.max_model_len,
        files={},
        tool_parser=parsers.tools,
        reasoning_parser=parsers.reasoning,
    )
    return ModelSource(card, found.files)


def _simulated(settings: EngineSettings) -> SimulatedEngine:
    try:
        return SimulatedEngine(
            name=settings.served_model_name or settings.model or "sim",
            engine_args=settings.engine_args.values,
            sim=settings.sim.values,
        )
    except BadOption as error:
        raise BadSetting(str(error)) from error


def _model(settings: EngineSettings) -> str:
    if settings.model is None:
        raise BadSetting("--engine vllm needs --model: a directory or a name")
    return settings.model
