"""The engine's slots: first come, first served, and one who wants them all."""

import asyncio

from workers.slots import Slots


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class Client:
    """Holds slots in a task until told to let go."""

    def __init__(self, slots: Slots, *, alone: bool = False) -> None:
        self.cancelled = asyncio.Event()
        self.inside = False
        self._let_go = asyncio.Event()
        self._slots = slots
        self.task = asyncio.create_task(self._hold(alone))

    async def _hold(self, alone: bool) -> None:
        async with self._slots.one(unless=self.cancelled):
            if alone:
                async with self._slots.others(unless=self.cancelled):
                    await self._stay()
            else:
                await self._stay()

    async def _stay(self) -> None:
        self.inside = True
        await self._let_go.wait()
        self.inside = False

    async def leave(self) -> None:
        self._let_go.set()
        await self.task
        await settle()


def test_no_more_run_than_there_are_slots_and_the_next_is_the_first_that_came() -> None:
    async def main() -> None:
        slots = Slots(2)
        clients = [Client(slots) for _ in range(4)]
        await settle()
        assert [client.inside for client in clients] == [True, True, False, False]
        await clients[0].leave()
        assert [client.inside for client in clients] == [False, True, True, False]
        for client in clients[1:]:
            await client.leave()

    asyncio.run(main())


def test_one_that_is_cancelled_while_it_waits_goes_on_without_a_slot() -> None:
    async def main() -> None:
        slots = Slots(1)
        first, second, third = Client(slots), Client(slots), Client(slots)
        await settle()
        second.cancelled.set()
        await settle()
        assert second.inside
        assert not third.inside
        await second.leave()
        assert not third.inside, "the one without a slot had none to give back"
        await first.leave()
        assert third.inside
        await third.leave()

    asyncio.run(main())


def test_one_that_must_run_alone_waits_for_all_and_nobody_comes_in_meanwhile() -> None:
    async def main() -> None:
        slots = Slots(2)
        first = Client(slots)
        suspect = Client(slots, alone=True)
        await settle()
        late = Client(slots)
        await settle()
        assert (first.inside, suspect.inside, late.inside) == (True, False, False)
        await first.leave()
        assert (suspect.inside, late.inside) == (True, False)
        await suspect.leave()
        assert late.inside
        await late.leave()

    asyncio.run(main())


def test_two_that_must_run_alone_run_one_after_the_other() -> None:
    async def main() -> None:
        slots = Slots(2)
        one, two = Client(slots, alone=True), Client(slots, alone=True)
        await settle()
        assert [one.inside, two.inside] == [True, False]
        await one.leave()
        assert two.inside
        await two.leave()
        both = [Client(slots), Client(slots)]
        await settle()
        assert all(client.inside for client in both), "every slot came back"
        for client in both:
            await client.leave()

    asyncio.run(main())


def test_one_that_is_cancelled_while_it_waits_to_be_alone_gives_everything_back() -> None:
    async def main() -> None:
        slots = Slots(2)
        first, suspect = Client(slots), Client(slots, alone=True)
        await settle()
        suspect.cancelled.set()
        await settle()
        assert suspect.inside
        await suspect.leave()
        await first.leave()
        both = [Client(slots), Client(slots)]
        await settle()
        assert all(client.inside for client in both)
        for client in both:
            await client.leave()

    asyncio.run(main())


def test_one_without_a_slot_that_would_be_alone_has_none_to_give_back() -> None:
    async def main() -> None:
        slots = Slots(1)
        first, suspect, second = Client(slots), Client(slots, alone=True), Client(slots)
        await settle()
        suspect.cancelled.set()
        await settle()
        assert (first.inside, suspect.inside, second.inside) == (True, True, False)
        await suspect.leave()
        late = Client(slots)
        await settle()
        assert (second.inside, late.inside) == (False, False)
        for client in (first, second, late):
            await client.leave()

    asyncio.run(main())
