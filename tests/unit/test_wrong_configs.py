"""Command lines that cannot work, or would not do what they say: each is refused, in words that name keys and fix."""

from pathlib import Path

import pytest
import yaml

from rlpost.config import register
from rlpost.launch import check_overrides

CORPUS = yaml.safe_load(Path(__file__).with_name("wrong_configs.yaml").read_text())


def words(line: str) -> list[str]:
    """Split where a shell would, had one quoted the braces."""
    parts: list[str] = []
    for word in line.split(" "):
        if parts and parts[-1].count("{") > parts[-1].count("}"):
            parts[-1] += f" {word}"
        else:
            parts.append(word)
    return parts


def batches(cases: list[dict]) -> list[list[dict]]:
    """The cases in as few command lines as there can be without a key twice."""
    made: list[tuple[set[str], list[dict]]] = []
    for case in cases:
        keys = {word.partition("=")[0] for word in words(case["set"])}
        fit = next((batch for batch in made if not batch[0] & keys), None)
        if fit is None:
            made.append(fit := (set(), []))
        fit[0].update(keys)
        fit[1].append(case)
    return [batch for _, batch in made]


def refuses(overrides: list[str], cases: list[dict]) -> None:
    register()
    message = check_overrides(overrides)
    assert message is not None, f"{overrides} passed"
    for case in cases:
        for said in case["says"]:
            assert said in message, f"'{said}' is not in: {message}"


def test_there_are_enough_cases_and_none_twice():
    cases = [case["set"] for case in sum(CORPUS.values(), [])]
    assert len(set(cases)) == len(cases) >= 150


@pytest.mark.parametrize("case", CORPUS["alone"], ids=lambda case: case["set"][:60])
def test_wrong_config_is_refused(case):
    refuses(words(case["set"]), [case])


@pytest.mark.parametrize(
    "cases",
    batches(CORPUS["values together"]) + batches(CORPUS["unread together"]),
    ids=lambda cases: f"{len(cases)} at once",
)
def test_wrong_configs_are_refused_together(cases):
    refuses([word for case in cases for word in words(case["set"])], cases)
