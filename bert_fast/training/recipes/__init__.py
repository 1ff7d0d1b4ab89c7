"""Whole runs from plain settings: what the command line calls, and what a script may call as well."""

from bert_fast.training.recipes.build import SIZES, make_config
from bert_fast.training.recipes.inference import TrainedModel
from bert_fast.training.recipes.runs import plan_text, run
from bert_fast.training.recipes.settings import Settings, SettingsError

__all__ = [
    "SIZES",
    "Settings",
    "SettingsError",
    "TrainedModel",
    "make_config",
    "plan_text",
    "run",
]
