"""Our top-level packages are flat: nobody else's may have one of their names."""

import tomllib
from importlib.metadata import packages_distributions
from typing import Any

import pytest

from tests.servers import ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
OURS: list[str] = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


@pytest.mark.parametrize("name", OURS)
def test_no_other_installed_distribution_has_a_package_of_our_name(name: str) -> None:
    owners = packages_distributions().get(name, [])
    assert [owner for owner in owners if owner != PROJECT["project"]["name"]] == []
