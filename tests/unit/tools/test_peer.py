"""A process that answers questions: an error over there is raised here, and its end is noticed."""

import pytest

from rlpost.tools.checks.peer import Peer


def double(requests, answers):
    while (question := requests.get()) is not None:
        answers.put(2 * question)


def fail(requests, answers):
    raise PermissionError("/proc/1/fd/3")


def leave(requests, answers):
    raise SystemExit(3)


def test_a_peer_that_fails_says_why():
    with Peer(fail) as peer, pytest.raises(RuntimeError, match="PermissionError: /proc/1/fd/3"):
        peer.ask("anything")
    with Peer(leave) as peer, pytest.raises(RuntimeError, match="ended with status 3"):
        peer.ask("anything")


def test_a_peer_answers_until_it_is_stopped():
    with Peer(double) as peer:
        assert [peer.ask(i) for i in (1, 2)] == [2, 4]
