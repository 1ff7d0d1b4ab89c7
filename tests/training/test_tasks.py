"""The table of tasks: whatever depends on the task follows from its settings."""

from pathlib import Path

import pytest

from bert_fast.training.config import TrainingConfig
from bert_fast.training.recipes.settings import fields_of
from bert_fast.training.tasks import TASKS


@pytest.mark.parametrize("name", TASKS)
def test_a_task_has_the_name_of_its_line_in_the_table(name: str, tmp_path: Path) -> None:
    settings = TASKS[name](train="x")  # type: ignore[call-arg]
    assert settings.make_task(None, None).name == name
    training = TrainingConfig(tmp_path, epochs=1)
    assert settings.phases(training) == [(settings, training)]


@pytest.mark.parametrize("name", TASKS)
def test_every_setting_of_a_task_has_help(name: str) -> None:
    fields = fields_of(TASKS[name])
    assert list(fields)[:2] == ["train", "valid"] and "max_length" in fields
    assert all(field.help for field in fields.values())
