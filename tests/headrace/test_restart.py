"""Facts about when a process that ended is started again."""

from headrace.restart import Restarts


def test_the_first_death_is_followed_at_once_and_later_ones_after_at_most_2_s() -> None:
    restarts, delays = Restarts(), []
    for _ in range(6):
        restarts, delay_s = restarts.after(lived_s=0.1)
        delays.append(delay_s)
    assert delays == [0.0, 0.5, 1.0, 2.0, 2.0, 2.0]


def test_ten_seconds_of_life_begin_the_count_anew() -> None:
    restarts = Restarts(deaths=5)
    assert restarts.after(lived_s=9.9) == (Restarts(6), 2.0)
    assert restarts.after(lived_s=10.0) == (Restarts(1), 0.0)
