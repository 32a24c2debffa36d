"""Training in one process: build a recipe, train it, save its state and resume it.
Loss, backward pass, clipping and optimizer step are in `train_step` of `loop.py`; `Cooperation.clip` does the clipping.
"""

from holdfast.recipe.probe import Gate
from holdfast.training.build import Training
from holdfast.training.forgotten_state.search import find_forgotten
from holdfast.training.horizon import find_idle, list_events
from holdfast.training.init_from import begin_from, begin_from_folder
from holdfast.training.loop import evaluate_recipe, steps
from holdfast.training.moving import TakenOver, move_in
from holdfast.training.naming import find_wanted
from holdfast.training.observing import StepObserver
from holdfast.training.probing import measure_probe
from holdfast.training.progress import TrainingProgress
from holdfast.training.recording import read_lines
from holdfast.training.resuming import Resumed, resume
from holdfast.training.runner import run_program
from holdfast.training.saving import begin_save, begin_save_between, count_params, describe_state
from holdfast.training.sharded.exchange import Exchange
from holdfast.training.sharded.restoring import find_shards, read_shards
from holdfast.training.skipping import set_skipped
from holdfast.training.surviving import go_back, save_alone

__all__ = [
    "Exchange",
    "Gate",
    "StepObserver",
    "TrainingProgress",
    "Resumed",
    "Training",
    "TakenOver",
    "begin_from",
    "begin_from_folder",
    "begin_save",
    "begin_save_between",
    "count_params",
    "describe_state",
    "evaluate_recipe",
    "find_forgotten",
    "find_idle",
    "find_shards",
    "find_wanted",
    "go_back",
    "list_events",
    "measure_probe",
    "move_in",
    "read_lines",
    "read_shards",
    "resume",
    "run_program",
    "save_alone",
    "set_skipped",
    "steps",
]
