"""What is served over WebSockets, by path."""

from typing import Final

from streamer import response_socket, websocket
from streamer.sockets import Room

ROOMS: Final[dict[str, Room]] = websocket.ROOMS | response_socket.ROOMS
