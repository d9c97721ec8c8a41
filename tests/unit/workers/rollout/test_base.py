"""What every engine is asked: which groups' logprobs, how long answers."""

from rlpost.workers.rollout.base import SamplingSpec


def spec(every: int) -> SamplingSpec:
    return SamplingSpec(temperature=1.0, max_tokens=4, vocab_size=32, logprobs_every=every)


def test_logprobs_are_asked_for_of_all_groups_of_none_or_of_about_one_in_so_many():
    assert spec(1).for_group("a") == spec(1)
    assert spec(0).for_group("a") == spec(0)
    asked = [spec(8).for_group(f"data/0/{i}").logprobs_every for i in range(4000)]
    assert set(asked) == {0, 1}
    assert 400 < sum(asked) < 600  # 500 expected
    assert asked == [spec(8).for_group(f"data/0/{i}").logprobs_every for i in range(4000)]


def test_probes_ask_for_all_logprobs_of_answers_that_are_never_longer_than_trainings():
    assert spec(8).for_probe(None) == spec(1)
    assert [spec(0).for_probe(limit).max_tokens for limit in (3, 4, 5)] == [3, 4, 4]
    assert spec(0).for_probe(3).logprobs_every == 1
