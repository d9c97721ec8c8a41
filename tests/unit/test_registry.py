import pytest

from rlpost.registry import Registry, load_dotted


def test_registry_returns_what_was_registered_and_lists_names():
    things: Registry[int] = Registry("thing")
    things.register("one")(1)
    assert things.get("one") == 1 and things.names() == ["one"]


def test_registry_refuses_a_second_use_of_a_name():
    things: Registry[int] = Registry("thing")
    things.register("one")(1)
    with pytest.raises(ValueError, match="'one' is registered twice"):
        things.register("one")(2)


def test_registry_miss_names_near_ones_and_failed_imports():
    things: Registry[int] = Registry("policy loss", modules=["rlpost.no_such_module"])
    things.register("ppo_clip")(1)
    with pytest.raises(
        ValueError,
        match="algo.loss_mode=ppo_clp: no such policy loss; did you mean 'ppo_clip'.*no_such_module did not import",
    ):
        things.get("ppo_clp", "algo.loss_mode")


def test_load_dotted_names_the_key_and_what_is_missing():
    assert load_dotted("math.sqrt", "reward.terms.a.fn")(4) == 2
    with pytest.raises(ValueError, match="reward.terms.a.fn=nowhere.f: module 'nowhere' does not import.*PYTHONPATH"):
        load_dotted("nowhere.f", "reward.terms.a.fn")
    with pytest.raises(ValueError, match="module 'math' has no 'sqrtt'; did you mean 'sqrt'"):
        load_dotted("math.sqrtt", "reward.terms.a.fn")
    with pytest.raises(ValueError, match="expected a dotted path"):
        load_dotted("sqrt", "reward.terms.a.fn")


@pytest.mark.parametrize(
    "path, wanted",
    [
        ("./my_reward.py:score", "my_reward.score"),
        ("my_reward.py:score", "my_reward.score"),
        ("/home/me/my_reward.py", "my_reward.my_function"),
        ("rewards/my_reward:score", "my_reward.score"),
        ("mytask/my_reward.score", "my_reward.my_function"),
    ],
)
def test_load_dotted_says_how_a_file_is_named(path, wanted):
    with pytest.raises(ValueError) as caught:
        load_dotted(path, "reward.terms.a.fn")
    assert str(caught.value).startswith(
        f"reward.terms.a.fn={path}: expected module and name, not a file: write reward.terms.a.fn={wanted}, and start"
    )
