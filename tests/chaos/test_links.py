"""A link between a client and a server, over real sockets."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from chaos.links import HOST, Link
from headrace.sockets import reserve

Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter

PATIENCE_S = 60.0
PROBES = 20


async def _echo(reader: Reader, writer: Writer) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


@asynccontextmanager
async def _linked() -> AsyncIterator[tuple[Link, Reader, Writer]]:
    """Give a link to a server that echoes, and a connection through it."""
    server = await asyncio.start_server(_echo, HOST, 0)
    link = Link(server.sockets[0].getsockname()[1])
    await link.open()
    try:
        reader, writer = await _connect(link)
        try:
            yield link, reader, writer
        finally:
            writer.transport.abort()
    finally:
        await link.close()
        server.close()


async def _connect(link: Link) -> tuple[Reader, Writer]:
    return await asyncio.open_connection(HOST, int(link.url.rpartition(":")[2]))


async def _said(reader: Reader, writer: Writer, text: bytes) -> bytes:
    writer.write(text)
    return await reader.readexactly(len(text))


def _run(test: Callable[[Link, Reader, Writer], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(PATIENCE_S), _linked() as (link, reader, writer):
            assert await _said(reader, writer, b"hello") == b"hello"
            await test(link, reader, writer)

    asyncio.run(run())


async def _is_broken(reader: Reader) -> bool:
    try:
        return await reader.read(1) == b""
    except ConnectionResetError:
        return True


def test_a_mended_link_is_a_wire_also_for_much() -> None:
    async def test(link: Link, reader: Reader, writer: Writer) -> None:
        much = bytes(range(256)) * 40_000
        writer.write(much)
        assert await reader.readexactly(len(much)) == much

    _run(test)


def test_a_cut_link_breaks_connections_and_lets_nobody_in_until_it_is_mended() -> None:
    async def test(link: Link, reader: Reader, writer: Writer) -> None:
        link.cut()
        assert await _is_broken(reader)
        refused, other = await _connect(link)
        assert await _is_broken(refused)
        other.close()
        link.mend()
        again, other = await _connect(link)
        assert await _said(again, other, b"again") == b"again"
        other.close()

    _run(test)


def test_a_held_link_lets_all_pass_once_it_is_mended() -> None:
    async def test(link: Link, reader: Reader, writer: Writer) -> None:
        link.hold()
        late, other = await _connect(link)
        for side in (writer, other):
            side.write(b"later")
        for _ in range(PROBES):  # a turn of the loop is all that a wire needs
            await asyncio.sleep(0)
        assert reader._buffer == late._buffer == b""  # type: ignore[attr-defined]
        link.mend()
        assert await reader.readexactly(5) == b"later"
        assert await late.readexactly(5) == b"later"
        other.close()

    _run(test)


def test_a_swallowing_link_loses_what_is_sent_and_breaks_when_it_is_mended() -> None:
    async def test(link: Link, reader: Reader, writer: Writer) -> None:
        link.swallow()
        writer.write(b"lost")
        await writer.drain()
        link.mend()
        assert await _is_broken(reader)
        again, other = await _connect(link)
        assert await _said(again, other, b"again") == b"again"
        other.close()

    _run(test)


def test_a_link_to_a_server_that_is_away_breaks_at_once() -> None:
    async def test(_link: Link, _reader: Reader, _writer: Writer) -> None:
        with reserve(HOST, 0) as nobody:  # a port that no other process can get meanwhile
            link = Link(nobody.getsockname()[1])
            await link.open()
            reader, writer = await _connect(link)
            assert await _is_broken(reader)
            writer.close()
            await link.close()

    _run(test)
