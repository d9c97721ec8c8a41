"""docs/licenses.md names everything that the locks pin."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def licenses():
    spec = importlib.util.spec_from_file_location("licenses", ROOT / "scripts" / "licenses.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows() -> dict[tuple[str, str], tuple[str, list[str]]]:
    """(package, version) -> licence, environments."""
    lines = (ROOT / "docs" / "licenses.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]
    return {(name, version): (licence, where.split(", ")) for name, version, licence, where in cells[1:]}


@pytest.mark.parametrize("kind", ["cpu", "sglang"])
def test_every_locked_package_is_named_with_its_licence(licenses, kind):
    named = rows()
    missing = []
    for requirement in licenses.locked(kind):
        key = licenses.canonicalize_name(requirement.name), next(iter(requirement.specifier)).version
        licence, environments = named.get(key, ("", []))
        if not licence or kind not in environments:
            missing.append(key)
    assert missing == [], "write it anew: make licenses"
    assert len(named) > 200 and any(name == "torch" for name, _ in named)


def test_licence_is_an_expression_a_short_name_or_a_classifier(licenses):
    def said(**fields):
        class Package:
            class metadata:
                @staticmethod
                def get(name):
                    return fields.get(name.replace("-", "_"))

                @staticmethod
                def get_all(name):
                    return fields.get("classifiers")

        return licenses.licence(Package)

    assert said(License_Expression="MIT", License="x") == "MIT"
    assert said(License="BSD") == "BSD"
    whole_text = "Copyright (c) 2025\n\nPermission is hereby granted ..."
    assert said(License=whole_text, classifiers=["License :: OSI Approved :: MIT License"]) == "MIT License"
    assert said(License=whole_text) == "Copyright (c) 2025"
    assert said() == "not stated"
