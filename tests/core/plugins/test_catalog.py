"""The catalog: each idea has a class that loads, a source and a claim."""

from __future__ import annotations

import pytest

from chairlift.config import EngineConfig
from chairlift.core.plugins.catalog import IDEAS
from chairlift.core.scheduler.policies import policy_from_config


@pytest.mark.parametrize("name", IDEAS)
def test_each_idea_loads_and_says_where_it_comes_from(name: str) -> None:
    idea = IDEAS[name]
    config = EngineConfig.from_flat(idea.settings).scheduler
    assert policy_from_config(config).name
    assert idea.source and idea.claim and "\n" not in idea.claim
