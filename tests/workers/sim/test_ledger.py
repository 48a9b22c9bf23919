from workers.sim.ledger import ENTRIES_MAX, Ledger


def test_it_counts_by_request_and_keeps_the_last_10_000() -> None:
    ledger = Ledger()
    ledger.start("a")
    ledger.start("a").tokens += 12
    assert ledger.snapshot() == {"a": {"starts": 2, "aborts": 0, "tokens": 12}}
    for number in range(ENTRIES_MAX):
        ledger.start(str(number))
    assert len(ledger.snapshot()) == ENTRIES_MAX
    assert "a" not in ledger.snapshot()
