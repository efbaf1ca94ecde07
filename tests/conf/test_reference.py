"""The page of settings is what the schema says."""

import dataclasses
from pathlib import Path

from conf.reference import settings_reference
from conf.schema import Rollout

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_page_of_settings_is_up_to_date() -> None:
    assert PAGE.read_text() == settings_reference(), "run: python -m conf.reference > docs/settings.md"


def test_every_setting_has_a_row_with_its_meaning() -> None:
    for field in dataclasses.fields(Rollout):
        assert f"| `rollout.{field.name}` |" in settings_reference()
        assert field.metadata["help"]
