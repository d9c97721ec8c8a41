"""`PromptQueue`: whose turn it is, between the stream, a sampler's order and what the user adds."""

import pickle

import pytest

from rlpost.trainer.prompts import PromptQueue
from tests.unit.trainer.rollouts import Stream, prompt


def popped(queue, n):
    return [queue.pop().index for _ in range(n)]


def hardest_first(prompts):
    return sorted(range(len(prompts)), key=lambda i: -prompts[i].index)


def test_the_stream_comes_in_its_own_order_and_no_further_than_it_was_asked():
    stream = Stream()
    queue = PromptQueue(stream)
    assert popped(queue, 3) == [0, 1, 2] and stream.cursor == 3


def test_the_sampler_orders_one_window_after_the_other_and_the_rest_that_the_stream_has():
    assert popped(PromptQueue(Stream(8), hardest_first, window=3), 8) == [2, 1, 0, 5, 4, 3, 7, 6]


def test_a_stream_that_ends_gives_none_and_the_sampler_is_not_asked_about_nothing():
    seen = []

    def sampler(prompts):
        seen.append(len(prompts))
        return range(len(prompts))

    queue = PromptQueue(Stream(3), sampler, window=2)
    assert popped(queue, 3) == [0, 1, 2]
    assert queue.pop() is None and queue.pop() is None and seen == [2, 1]


def test_added_prompts_come_first_in_their_order_under_ids_of_their_own():
    queue = PromptQueue(Stream(), hardest_first, window=2)
    queue.pop()
    queue.add(prompt(7))
    queue.add(prompt(7))
    first, second = queue.pop(), queue.pop()
    assert (first.id, first.index) == ("added/1/d/0/7", -1) and (second.id, second.index) == ("added/2/d/0/7", -2)
    assert (first.token_ids == prompt(7).token_ids).all()
    assert popped(queue, 2) == [0, 3]


def test_prompts_can_be_added_after_the_stream_has_ended():
    queue = PromptQueue(Stream(0))
    assert queue.pop() is None
    queue.add(prompt(3))
    assert popped(queue, 1) == [-1] and queue.pop() is None


@pytest.mark.parametrize(
    "order, shown", [([0, 0, 1], r"\[0, 0, 1\]"), ([0, 1], r"\[0, 1\]"), ([1, 2, 3], r"\[1, 2, 3\]"), (None, r"\[\]")]
)
def test_a_sampler_that_forgets_or_repeats_prompts_is_refused(order, shown):
    queue = PromptQueue(Stream(), lambda prompts: order, window=3)
    with pytest.raises(ValueError, match=f"trainer.sampler returned {shown} for 3 prompts: .* positions 0..2 once"):
        queue.pop()


def test_peek_shows_the_streams_next_and_leaves_them_there():
    queue = PromptQueue(Stream(6), hardest_first, window=3)
    queue.pop()
    queue.add(prompt(9))
    assert [p.index for p in queue.peek(2)] == [3, 4]
    assert [p.index for p in queue.peek(9)] == [3, 4, 5]
    assert popped(queue, 6) == [-1, 1, 0, 5, 4, 3]


def test_restored_queue_goes_on_where_the_saved_one_was():
    queue = PromptQueue(Stream(), hardest_first, window=3)
    queue.add(prompt(7))
    queue.add(prompt(8))
    assert popped(queue, 1) == [-1]
    queue.add(prompt(9))
    popped(queue, 3)
    queue.add(prompt(5))
    state = pickle.loads(pickle.dumps(queue.state_dict()))
    restored = PromptQueue(Stream(), hardest_first, window=3)
    restored.load_state_dict(state)
    restored.add(prompt(6))
    queue.add(prompt(6))
    assert popped(queue, 7) == popped(restored, 7) == [-4, -5, 1, 0, 5, 4, 3]
