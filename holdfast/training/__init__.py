"""Training in one process: build a recipe, train it, save its state and resume it.
Loss, backward pass, clipping and optimizer step are in `train_step` of `loop.py`; `Cooperation.clip` does the clipping.
"""

from holdfast.recipe.probe import Gate
from holdfast.training.build import Training
from holdfast.training.examinations import examine_recipe
from holdfast.training.horizon import find_idle, list_events
from holdfast.training.lone_save import go_back, save_alone
from holdfast.training.loop import evaluate_recipe, repeat_evaluation, steps
from holdfast.training.probing import measure_probe
from holdfast.training.recording import spell_lines
from holdfast.training.rehearsing import digest_form, forget_committed, take_up
from holdfast.training.repeating import repeat_last_step
from holdfast.training.resuming import Resumed, resume, resume_weights
from holdfast.training.runner import run_program
from holdfast.training.saving import SaveRequest, begin_save, count_params
from holdfast.training.skipped_steps import set_skipped

__all__ = [
    "Gate",
    "Resumed",
    "SaveRequest",
    "Training",
    "begin_save",
    "count_params",
    "digest_form",
    "evaluate_recipe",
    "examine_recipe",
    "find_idle",
    "forget_committed",
    "go_back",
    "list_events",
    "measure_probe",
    "repeat_evaluation",
    "repeat_last_step",
    "resume",
    "resume_weights",
    "run_program",
    "save_alone",
    "set_skipped",
    "spell_lines",
    "steps",
    "take_up",
]
