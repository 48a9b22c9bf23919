"""The numbers of a streamer."""

from headrace.telemetry import Reading
from streamer.desk import Desk
from streamer.mailbox import Mailbox
from streamer.sockets import Sockets


def readings(mailbox: Mailbox, sockets: Sockets) -> list[Reading]:
    """Return what /metrics shows."""
    return [
        Reading("replies_open", "Replies with a client.", lambda: mailbox.open_count),
        Reading("replies_opened", "Replies begun.", lambda: mailbox.opened, "counter"),
        Reading("websockets", "WebSocket connections.", lambda: sockets.open_count),
        Reading("reply_events", "Events sent.", lambda: mailbox.tokens, "counter"),
    ]


def desk_readings(desk: Desk) -> list[Reading]:
    """Return what /metrics shows of redirects; a gateway has none."""
    what = "Replies that have begun and whose client has not come yet."
    return [Reading("replies_waiting", what, lambda: desk.waiting)]
