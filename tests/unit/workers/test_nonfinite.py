"""A number that is not finite on one rank: no rank makes the update, nor those that would follow in the step."""

import math

import pytest
from faulty import Plant, train_all
from ranks import Case, in_ranks, write_model

NAN, INF = math.nan, math.inf
PLANTS = {
    "loss": Plant("loss"),
    "infinite_loss": Plant("loss", number=INF),
    "gradient": Plant("gradient"),
    "advantage": Plant("advantage"),
    "weight": Plant("weight"),
    "second_update": Plant("loss", group=4),
    "none": Plant("loss", group=-1),
}
IN_FLOAT16 = {"overflow": Plant("loss", number=1e3), "endless": Plant("gradient"), "not_a_number": Plant("loss")}
ARRANGEMENTS = {"one": (1, {}), "two": (2, {}), "replicas": (2, {"fsdp_size": 1}), "sequence": (2, {"sequence": 2})}


@pytest.fixture(scope="module")
def all_results(tmp_path_factory):
    """By number of ranks, arrangement and plant."""
    path = write_model(tmp_path_factory.mktemp("model"))
    return {
        ranks: in_ranks(
            ranks,
            train_all,
            {
                (arrangement, name): (Case(str(path), actor={"dtype": dtype}, **changes), plant)
                for arrangement, (size, changes) in ARRANGEMENTS.items()
                if size == ranks
                for dtype, plants in (("float32", PLANTS), ("float16", IN_FLOAT16))
                for name, plant in plants.items()
            },
            tmp_path_factory.mktemp("ranks"),
        )
        for ranks in (1, 2)
    }


@pytest.fixture(params=ARRANGEMENTS)
def results(request, all_results):
    of_size = all_results[ARRANGEMENTS[request.param][0]]
    return {plant: of_size[request.param, plant] for plant in (*PLANTS, *IN_FLOAT16)}


@pytest.mark.parametrize("plant", ["loss", "infinite_loss", "gradient", "advantage", "weight"])
def test_no_rank_makes_an_update_that_is_not_finite_on_one(results, plant):
    assert set(results[plant]["ranks"]) == {
        (True, 0, False, True)
    }  # skipped, no updates, no moments, weights as before
    metrics = results[plant]["metrics"]
    assert metrics["actor/updates"] == 0 and metrics["actor/skipped_updates"] == 1
    assert "actor/grad_norm" not in metrics
    assert (metrics["actor/nonfinite_losses"] > 0) == (plant != "gradient")


def test_updates_before_the_fault_are_made_on_all_ranks(results):
    assert set(results["second_update"]["ranks"]) == {(True, 1, True, False)}
    metrics = results["second_update"]["metrics"]
    assert metrics["actor/updates"] == 1 and metrics["actor/skipped_updates"] == 1
    assert metrics["actor/grad_norm"] > 0


def test_step_that_is_finite_makes_all_its_updates(results):
    assert set(results["none"]["ranks"]) == {(False, 2, True, False)}
    metrics = results["none"]["metrics"]
    assert metrics["actor/skipped_updates"] == metrics["actor/nonfinite_losses"] == 0


def test_overflow_of_one_rank_in_float16_is_tried_again_by_all(results):
    assert set(results["overflow"]["ranks"]) == {(False, 2, True, False)}
    metrics, (scale, *others) = results["overflow"]["metrics"], results["overflow"]["scales"]
    assert metrics["actor/updates"] == 2 and metrics["actor/skipped_updates"] == 0
    assert metrics["actor/scale_retries"] > 3 and scale == 2 ** (16 - metrics["actor/scale_retries"])
    assert set(others) <= {scale}
    assert metrics["actor/tokens"] == results["none"]["metrics"]["actor/tokens"]


def test_gradient_of_one_rank_that_is_infinite_at_any_scale_stops_all(results):
    assert set(results["endless"]["ranks"]) == {(True, 0, False, True)}
    metrics = results["endless"]["metrics"]
    assert metrics["actor/scale_retries"] == 16 and metrics["actor/nonfinite_losses"] == 0
    assert set(results["endless"]["scales"]) == {2.0**16}


def test_loss_of_one_rank_that_is_not_finite_in_float16_is_not_tried_again(results):
    assert set(results["not_a_number"]["ranks"]) == {(True, 0, False, True)}
    metrics = results["not_a_number"]["metrics"]
    assert metrics["actor/scale_retries"] == 0 and metrics["actor/nonfinite_losses"] > 0
