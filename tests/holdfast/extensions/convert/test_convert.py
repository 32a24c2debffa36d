"""Scripts of many shapes become loops of a run: every line outside of the diff stays, and the result is proved."""

import difflib
import re
import shutil
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.extensions.convert.conversion import Conversion, convert
from tests.conftest import ROOT
from tests.support.lives import Lives

SCRIPTS = Path(__file__).parent / "scripts"
# A module that some of the scripts import from beside them.
BESIDE = Path(__file__).parent / "beside" / "zoo.py"
FOREIGN = ROOT / "tests" / "foreign" / "before"
GALLERY = ROOT / "examples" / "gallery" / "plain"
# What each script keeps, and its number of epochs; None for a script that doesn't say it.
EXPECTED = {
    "accelerate_script": ("model optimizer lr_scheduler history", 4),
    "dcgan": ("net_g net_d optimizer_d optimizer_g history", 10),
    "diffusion": ("model optimizer lr_scheduler ema noise_scheduler", 30),
    "distillation": ("teacher student optimizer scheduler progress", 5),
    "lightning_gan": ("", 6),
    "lightning_module": ("", None),
    "moco": ("model optimizer losses", 5),
    "language_model": ("model optimizer scaler x y", 1),
    "ppo": ("agent optimizer envs next_obs next_done", 1),
    "sft_script": ("", None),
    "trainer_script": ("", 5),
    "contrastive_text": ("model optimizer scheduler best", 8),
    "fine_tuning": ("model optimizer lr_scheduler", 8),
    "graph_network": ("model optimizer best", 1),
    "image_classification": ("model model_ema optimizer warmup cosine scheduler", 12),
    "soft_actor_critic": ("actor critics targets q_optimizer actor_optimizer a_optimizer env log_alpha rb obs", 1),
    "array_parts": ("model optimizer history best_mse epoch_loss", 4),
    "endless": ("model opt best_loss running xb yb", 1),
    "helper_functions": ("net opt warmup_sched", 7),
    "module_state": ("net optimizer scheduler", 6),
    "recurrent": ("embed rnn head optimizer memory", 9),
    "replay": ("actor critic optimizer alpha_optimizer env memory log_alpha average place", 1),
    "trainer_class": ("model optimizer", 5),
}
LINES = {
    "accelerate_script": ["accelerator = run.accelerator", "for batch in run.batches():"],
    "array_parts": [
        "for epoch in run.epochs(per_epoch=len(range(0, len(inputs), batch_size))):",
        "epoch += 1",
        'run.log(**{"loss": state["epoch_loss"], "epoch": epoch})',
    ],
    "distillation": ["for epoch in run.epochs(train_loader):", "for inputs, labels in run.batches():"],
    "endless": ["for now in run.steps(per_epoch=max_iters):", 'state["xb"], state["yb"] = get_batch()'],
    "helper_functions": [
        'bar = tqdm(run.batches(), desc=f"epoch {epoch}")',
        "for number, (x, y) in enumerate(bar, run.batch_number + 1):",
        "folder.mkdir(exist_ok=True)",
        "sys.argv[1:] = []",
    ],
    "lightning_gan": ["held.fit(run, trainer, gan, loader)"],
    "moco": ["for i, (images, _) in enumerate(run.batches(), run.batch_number):"],
    "module_state": ["global best_acc", 'run.log(**{"train/loss": loss.item()})', "args = parser.parse_args([])"],
    "ppo": ["for now in run.steps(per_epoch=args.num_iterations):", "iteration = 1 + now.number"],
    "recurrent": ['state["memory"] = torch.zeros(1, 4, width)', 'state["memory"] = state["memory"].detach()'],
    "replay": [
        'state = {"average": average, "place": place}',
        "if args.tune:",
        "run.keep(alpha_optimizer=alpha_optimizer, log_alpha=log_alpha)",
        "for now in run.steps(per_epoch=1000):",
        "episode = 1 + now.number",
    ],
    "trainer_class": ["run.keep(model=self.model, optimizer=self.optimizer)", "for epoch in run.epochs(self.loader):"],
    "trainer_script": ["held.train(run, trainer)"],
}


def find_script(name: str) -> Path:
    return next(path for path in (folder / f"{name}.py" for folder in (SCRIPTS, FOREIGN, GALLERY)) if path.exists())


def convert_script(name: str) -> Conversion:
    return convert(find_script(name).read_text("utf-8"), f"{name}.py")


def test_every_script_is_listed() -> None:
    assert {path.stem for folder in (SCRIPTS, FOREIGN, GALLERY) for path in folder.glob("*.py")} == {*EXPECTED}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_script_becomes_a_loop(name: str) -> None:
    kept, epochs = EXPECTED[name]
    found = convert_script(name)
    assert (found.kept, found.epochs) == (kept.split(), epochs)
    lines = [line.strip() for line in found.text.splitlines()]
    assert [line for line in LINES.get(name, []) if line not in lines] == []
    assert f"def {found.function}(run: holdfast.Run) -> None:" in lines


def test_what_stays_is_told() -> None:
    questions = convert_script("module_state").questions
    assert any("best_acc" in each and "global" in each for each in questions)
    assert any("sums count only the batches since: train_loss" in each for each in questions)
    assert any("distillation.py:42: this loop trains, too" in each for each in convert_script("distillation").questions)


def test_what_a_resume_would_change_is_told() -> None:
    questions = "\n".join(convert_script("helper_functions").questions)
    assert "py:37: a resume inside an epoch begins hidden anew" in questions
    assert "since: seen" in questions
    assert "a run trains once: take the loop that trains out of this loop" in questions
    assert "a resume finds this folder" in questions
    assert "cudnn.benchmark" not in convert_script("helper_functions").text
    assert "deleted, because equal bits need it" in questions
    questions = "\n".join(convert_script("replay").questions)
    assert "how many steps? 1000 is written" in questions
    assert "does a step depend on the value of actor_loss" in questions


LOGGED = """
import csv
import torch


class CSVLogger:
    def __init__(self, path, resume=False):
        self.file = open(path, "a" if resume else "w")
        self.rows = open("rows.csv", mode="w")

    def log(self, row):
        csv.writer(self.file).writerow(row)


def main():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 2)))
    logger = CSVLogger("log.csv")
    for epoch in range(3):
        for (x,) in loader:
            optimizer.zero_grad()
            loss = model(x).sum()
            loss.backward()
            optimizer.step()
        logger.log([epoch, loss.item()])


main()
"""


def test_a_logger_is_not_kept_and_a_file_that_begins_anew_is_told() -> None:
    found = convert(LOGGED, "logged.py")
    assert found.kept == ["model", "optimizer"]
    assert [each for each in found.questions if "begins this file anew" in each] == [
        "logged.py:9: each start of the run begins this file anew: open it to append, or use run.log"
    ]


def test_the_options_of_the_script_are_written_and_counted() -> None:
    text = find_script("module_state").read_text("utf-8")
    found = convert(text, "s.py", options=["--epochs", "3", "--resume"])
    assert found.epochs == 3
    assert 'args = parser.parse_args(["--epochs", "3", "--resume"])' in found.text
    text = find_script("helper_functions").read_text("utf-8")
    found = convert(text, "s.py", options=["-n", "2"])
    assert found.epochs == 2
    assert '    sys.argv[1:] = ["-n", "2"]\n' in found.text


def test_another_loop_can_be_chosen() -> None:
    text = find_script("distillation").read_text("utf-8")
    found = convert(text, "distillation.py", 42)
    assert (found.kept, found.epochs) == (["model", "optimizer"], 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("print(1)\n", "s.py has no loop that calls backward"),
        ("def f(:\n", "s.py:1: this isn't valid Python"),
        ("import holdfast\nholdfast.Run\n", "the script s.py uses holdfast already"),
        ("while go():\n    loss.backward()\n    optimizer.step()\n", "s.py:1: this loop has no fixed number of steps"),
    ],
)
def test_a_script_without_such_a_loop_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        convert(text, "s.py")


@pytest.mark.slow
def test_converted_scripts_are_proved(nursery: Lives, tmp_path: Path) -> None:
    shutil.copy(BESIDE, tmp_path)
    for name, *options in (["array_parts"], ["endless"], ["recurrent", "--epochs", "3"], ["replay"], ["module_state"]):
        script = shutil.copy(find_script(name), tmp_path)
        done = nursery.call("tests.support.forked:command", "convert", str(script), "--prove", "--", *options)
        assert done.returncode == 0, done.stdout + done.stderr
        assert re.search(rf"^proved: \d+ steps of \S*{name}_held.py:", done.stdout, re.MULTILINE)
        assert "enumerate(run.batches(...))" not in done.stdout  # it begins with run.batch_number
        shown = done.stdout.partition("\nkept: ")[0].splitlines()
        old, new = (Path(path).read_text("utf-8").splitlines() for path in (script, tmp_path / f"{name}_held.py"))
        assert not any("wandb" in line or "SummaryWriter" in line for line in new)
        assert shown[2:] == [*difflib.unified_diff(old, new, lineterm="")][2:]
    again = nursery.call("tests.support.forked:command", "convert", str(script), "--write")
    assert (again.returncode, again.stderr.splitlines()[0].partition(" exists")[1]) == (1, " exists")
