import pytest

from rlpost.workers.weight_sync.topology import Place, choose_transport, number_readers

CPU = Place("here", ("cpu",))


def gpus(*names: str, host: str = "here") -> Place:
    return Place(host, names)


@pytest.mark.parametrize("disjoint", [False, True])
def test_auto_follows_the_devices(disjoint):
    host_memory = "gloo" if disjoint else "shm"
    for trainers, engines, expected in [
        ([CPU], [CPU, CPU], host_memory),
        ([CPU], [CPU, Place("there", ("cpu",))], "gloo"),
        ([gpus("A"), gpus("B")], [gpus("B"), gpus("A")], "ipc"),
        ([gpus("A"), gpus("B")], [gpus("B")], "ipc"),
        ([gpus("A"), gpus("B")], [gpus("A", "B")], "ipc"),
        ([gpus("A")], [gpus("B"), gpus("C", "D", host="there")], "nccl"),
        ([gpus("A")], [gpus("B"), gpus("B")], host_memory),  # two engines on one device
        ([gpus("A")], [gpus("A"), gpus("B")], host_memory),  # one of them on rank 0's
    ]:
        assert choose_transport("auto", trainers, dict(enumerate(engines)), disjoint) == expected


def test_readers_of_a_device_are_numbered():
    engines = {1: gpus("A", "B"), 2: gpus("B"), 5: gpus("A"), 6: gpus("C", host="there"), 7: gpus("A")}
    assert number_readers(engines) == {1: {"A": 0, "B": 0}, 2: {"B": 1}, 5: {"A": 1}, 6: {"C": 0}, 7: {"A": 2}}


@pytest.mark.parametrize("asked", ["shm", "gloo", "nccl"])
def test_what_is_asked_for_is_taken_where_it_works(asked):
    assert choose_transport(asked, [gpus("A")], {0: gpus("B")}, True) == asked


@pytest.mark.parametrize(
    "asked, trainer, engine, reason",
    [
        ("nccl", CPU, CPU, "it moves weights between devices, and this is a CPU"),
        ("ipc", CPU, CPU, "it moves weights between devices, and this is a CPU"),
        ("ipc", gpus("A"), gpus("B"), "replica 7's device B holds no trainer rank whose memory it could map"),
        ("nccl", gpus("A"), gpus("A"), "device A would hold 2 ranks of one group, which NCCL and RCCL refuse"),
        ("shm", CPU, Place("there", ("cpu",)), "replica 7 is not on the host"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(asked, trainer, engine, reason):
    with pytest.raises(ValueError, match=f"rollout.weight_sync={asked} cannot work here: {reason}"):
        choose_transport(asked, [trainer], {7: engine}, False)
