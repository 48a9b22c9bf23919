"""What the tests of Python's SDKs ask for, and how they look at what comes."""

from typing import Any, TypeVar

import openai
from pydantic import BaseModel

MODEL = "sim"
PATIENCE_S = 60.0
MESSAGES: Any = [{"role": "user", "content": "Where is the river?"}]
PIECES = ["The ", "river ", "is ", "in ", "Ulm", "."]
TEXT = "".join(PIECES)
ULM = '{"name":"Ulm","people":126000}'
CALL = {"name": "City", "arguments": [ULM[:9], ULM[9:16], ULM[16:]]}

_Model = TypeVar("_Model", bound=BaseModel)


class City(BaseModel):
    """A city."""

    name: str
    people: int


CITY = City(name="Ulm", people=126000)


def hook(**members: Any) -> dict[str, Any]:
    """Return what SDKs take beside their own arguments: the simulated engine's hook."""
    return {"sim": members}


def says(*pieces: str, **members: Any) -> dict[str, Any]:
    """Return a hook that says some pieces, by default `PIECES`."""
    return hook(pieces=list(pieces or PIECES), **members)


# Without TLS to check: reading the CA files takes longer than most of the tests.


def client(url: str, key: str = "none") -> openai.OpenAI:
    """Return OpenAI's client; it does not ask again by itself."""
    http = openai.DefaultHttpxClient(verify=False)
    return openai.OpenAI(
        base_url=f"{url}/v1", api_key=key, timeout=PATIENCE_S, max_retries=0, http_client=http
    )


def async_client(url: str, key: str = "none") -> openai.AsyncOpenAI:
    """Return OpenAI's asynchronous client; it does not ask again by itself."""
    http = openai.DefaultAsyncHttpxClient(verify=False)
    return openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key=key, timeout=PATIENCE_S, max_retries=0, http_client=http
    )


def checked(found: _Model) -> _Model:
    """Check what the SDK built without checking: every member is there, of its type."""
    return type(found).model_validate(found.to_dict())  # type: ignore[attr-defined]
