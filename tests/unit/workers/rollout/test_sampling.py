import pytest
import torch

from rlpost.workers.rollout.sampling import _mix, draw, truncate, uniform


def grid(num: int) -> torch.Tensor:
    """`num` evenly spread places in [0, 1)."""
    return (torch.arange(num, dtype=torch.float64) + 0.5) / num


def test_truncate_keeps_the_likeliest_and_renormalises_nothing():
    logits = torch.tensor([[0.5, 0.2, 0.2, 0.1]]).log()
    kept = truncate(logits, 2, 1.0)
    assert kept.isfinite().sum() == 2 and kept[0, 0] == logits[0, 0]
    assert truncate(logits, 4, 0.5).isfinite().tolist() == [[True, False, False, False]]
    assert truncate(logits, 4, 0.6).isfinite().sum() == 2


def test_truncate_takes_a_limit_for_each_row():
    logits = torch.randn(3, 7)
    top_k, top_p = torch.tensor([1, 7, 4]), torch.tensor([1.0, 0.5, 0.8])
    together = truncate(logits, top_k[:, None], top_p[:, None])
    for row, alone in enumerate(truncate(logits[i : i + 1], int(top_k[i]), float(top_p[i])) for i in range(3)):
        torch.testing.assert_close(together[row : row + 1], alone)


@pytest.mark.parametrize(("vocab_size", "num"), [(5, 40_000), (200_000, 100)])
def test_draw_follows_the_distribution(vocab_size, num):
    logits = torch.full((1, vocab_size), -20.0)
    logits[0, -4:] = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    logprobs = logits.log_softmax(-1)
    ids = draw(logprobs.expand(num, -1), grid(num))
    counts = ids.bincount(minlength=vocab_size)
    assert (counts - num * logprobs[0].exp()).abs().max() <= 1.5


def test_draw_never_gives_what_has_no_mass():
    logprobs = torch.tensor([[-torch.inf, 0.0, -torch.inf]])
    for place in (0.0, 0.5, 1.0 - 2.0**-53):
        assert draw(logprobs, torch.tensor([place], dtype=torch.float64)).tolist() == [1]


def test_mix_gives_the_published_numbers_of_splitmix64():
    states = torch.tensor([0, 0x9E3779B97F4A7C15 - 2**64])
    assert [x % 2**64 for x in _mix(states).tolist()] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_uniform_is_even_and_differs_between_neighbours():
    seeds, positions = torch.arange(200).repeat_interleave(100), torch.arange(100).repeat(200)
    places = uniform(seeds, positions)
    assert places.min() >= 0.0 and places.max() < 1.0 and len(places.unique()) == len(places)
    assert (places.histc(10, 0.0, 1.0) - 2000).abs().max() < 200  # 4.7 standard deviations
    table = places.view(200, 100) - 0.5
    for neighbours in (table[1:] * table[:-1], table[:, 1:] * table[:, :-1]):
        assert neighbours.mean().abs() < 5 / 12 / neighbours.numel() ** 0.5


def test_uniform_depends_on_its_row_alone():
    seeds, positions = torch.tensor([7, 2**41, 7]), torch.tensor([3, 3, 4])
    together = uniform(seeds, positions)
    for i in range(3):
        assert uniform(seeds[i : i + 1], positions[i : i + 1]).item() == together[i].item()
