"""The rest of a stream that is asked for again, at an ingress: its client is sent to a streamer.

Rule: whether there is such a stream is for the streamer to find out, which looks anyway.
"""

from headrace import topology
from ingress.handoff import Answer, Handoff
from schemas import subjects


class RestThere:
    """Hands the client over. A `headrace.resume.Rest`."""

    def __init__(self, handoff: Handoff) -> None:
        self._handoff = handoff

    async def __call__(self, *, tenant: str, request: str, after: int, returns: bool) -> Answer:
        """Return the answer of the handoff. Raises a Refusal."""
        return await self._handoff.attach(
            tenant=tenant,
            request=request,
            # The latest that it may be: its own is in the queue, where the streamer finds it.
            deadline_s=subjects.made_s(request) + topology.DEADLINE_S_MAX,
            stream=True,
            headers={"x-request-id": request},
            after=after,
            returns=returns,
        )
