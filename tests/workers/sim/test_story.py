from workers.sim.story import LENGTH_MAX, LENGTH_MIN, PAGE, Story
from workers.sim.vocabulary import vocabulary


def story(prompt: list[int], *, seed: int | None = None, choice: int = 0) -> Story:
    return Story(prompt, seed=seed, choice=choice, vocabulary=vocabulary())


def test_the_story_never_changes_between_releases() -> None:
    told = story([5, 6, 7])
    assert told.length == 126
    assert told.page(0)[:6] == [2035, 761, 653, 994, 761, 1261]
    assert told.page(3)[63] == 613


def test_prompt_seed_and_choice_each_make_another_story() -> None:
    stories = [
        story([5, 6, 7]),
        story([5, 6, 8]),
        story([5, 6, 7], seed=1),
        story([5, 6, 7], seed=-1),
        story([5, 6, 7], choice=1),
    ]
    assert len({tuple(told.page(0)) for told in stories}) == 5
    assert story([5, 6, 7], seed=0).page(0) == stories[0].page(0)


def test_pages_and_lengths_have_their_bounds() -> None:
    lengths = {story([5, number]).length for number in range(500)}
    assert (min(lengths), max(lengths)) == (LENGTH_MIN, LENGTH_MAX)
    assert len(story([5]).page(10**9)) == PAGE
