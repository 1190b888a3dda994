"""Versions of the image: they fit the project's bounds and cover what it needs."""

from __future__ import annotations

from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.constraints import requirements

DEPLOY = Path(__file__).parents[2] / "deploy"


def constraints() -> dict[str, Requirement]:
    lines = (DEPLOY / "constraints.txt").read_text().splitlines()
    return {each.name: each for each in map(Requirement, (line for line in lines if line and line[0] != "#"))}


def test_every_requirement_has_a_version_within_its_bounds() -> None:
    fixed = constraints()
    for wanted in requirements():
        (version,) = fixed[canonicalize_name(wanted.name)].specifier
        assert version.operator == "=="
        assert wanted.specifier.contains(version.version), wanted


def test_uvicorn_has_an_upper_bound() -> None:
    (uvicorn,) = (each for each in requirements() if each.name == "uvicorn")
    assert {each.operator for each in uvicorn.specifier} == {">=", "<"}


def test_the_image_is_built_with_them() -> None:
    assert "--constraint constraints.txt" in (DEPLOY / "Dockerfile").read_text()
    assert "!deploy/constraints.txt" in (DEPLOY / "Dockerfile.dockerignore").read_text()
