"""The scripts of examples/gallery: their page, their recorded runs, and how a test shortens them.

``python -m tests.support.gallery [NAME]...`` trains scripts straight, and killed and continued. It writes what the
commands print, and a picture of the curves, into examples/gallery/recorded/; ``make docs`` makes the page from these.
"""

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.journal import Journal
from holdfast.store import open_store
from tests.conftest import ROOT
from tests.support import forked, stopped
from tests.support.converted import count_changed, diff, find_pair
from tests.support.lives import Lives, lives
from tests.support.plots import Curve, draw
from tests.support.stopped import STOP

GALLERY = ROOT / "examples" / "gallery"
PLAIN = GALLERY / "plain"
RECORDED = GALLERY / "recorded"
# Where a plain script has its length.
LENGTH = re.compile(r'("--(?:num_|max_)?epochs", type=int, default=|max_iters = |total_timesteps: int = )\d+')
COMMAND = "tests.support.gallery:train"
SHOWN_CHUNKS = 2  # of each command, from its first one on


@dataclass(frozen=True)
class Entry:
    """A script of the gallery, and the words of its section.

    Args:
        text: what the script trains, and what is special about its diff.
        kill: the step in which the recorded run is killed.
        plotted: the logged value of the picture, with its name there.
        needs: packages of extras.
        late: modules that these packages import late.
    """

    name: str
    title: str
    text: str
    kill: int
    plotted: tuple[str, str] = ("loss", "loss")
    needs: tuple[str, ...] = ()
    late: tuple[str, ...] = ()

    @property
    def anchor(self) -> str:
        return self.title.lower().replace(" ", "-")

    @property
    def run(self) -> str:
        return self.name.replace("_", "-")


ENTRIES = [
    Entry(
        "image_classification",
        "Image classification",
        """\
A small residual network learns four shapes, as in torchvision's reference script: random crops and flips, label
smoothing, a warmup and a cosine, an average of the weights (EMA), and an evaluation after each epoch. The crops draw
random numbers for each sample. Holdfast seeds them by the batch's number, so that neither a kill nor loader workers
change a sample. So in this script alone, the weights differ from those of the script without Holdfast.""",
        kill=121,
    ),
    Entry(
        "language_model",
        "Language model",
        """\
A small GPT learns a tune. As in nanoGPT's script, the batches come from a memory-mapped file, gradients are
accumulated, and the next batch is drawn ahead. The run keeps this batch, because the next step trains on it.""",
        kill=133,
    ),
    Entry(
        "diffusion",
        "Diffusion",
        """\
A denoising diffusion model (DDPM) learns points on a spiral. The script's own class averages the weights, and every
tenth epoch the script draws samples with the average. The class has `state_dict`, so `run.keep` accepts it.""",
        kill=171,
    ),
    Entry(
        "fine_tuning",
        "Fine-tuning with peft",
        """\
LoRA adapters and a new head teach a small Llama of transformers to add digits. `save_pretrained` below the loop is
called once, when the run is complete, and writes the adapters that the script without Holdfast writes.""",
        kill=150,
        needs=("transformers", "peft"),
        late=("peft", "transformers.models.llama.modeling_llama"),
    ),
    Entry(
        "contrastive_text",
        "Contrastive text",
        """\
Two encoders learn by InfoNCE that a question's answer is nearer than all other answers of the batch. The temperature
is a parameter of the model. The run also keeps the dict `best`, which contains the best recall so far.""",
        kill=150,
    ),
    Entry(
        "graph_network",
        "Graph network",
        """\
A graph convolutional network learns the topics of a citation graph, with a sparse adjacency matrix. The whole graph
is one batch, so there is no loader: `run.steps(per_epoch=20)` counts the steps.""",
        kill=112,
    ),
    Entry(
        "soft_actor_critic",
        "Soft actor-critic",
        """\
SAC learns to swing up gymnasium's pendulum, as in cleanrl's script. SIGKILL ends the run in the middle of an episode.
To continue there, the run keeps the environment, the replay buffer of stable-baselines3, and the observation with
which the next step begins. [reinforcement-learning.md](reinforcement-learning.md) explains what a run keeps of an
environment.""",
        kill=1130,
        plotted=("episodic_return", "return of an episode"),
        needs=("gymnasium", "stable_baselines3"),
        late=("gymnasium", "stable_baselines3.common.buffers"),
    ),
    Entry(
        "lightning_module",
        "A LightningModule",
        """\
Lightning's Trainer keeps its loop, its callbacks and its logger; one call replaces `trainer.fit`. Gradients are
accumulated over two batches. The module weighs a loss by the last eight losses, so the run keeps these losses, too.
[lightning.md](lightning.md) lists the state that is saved without your help.""",
        kill=203,
        needs=("lightning",),
        late=("lightning", "torchmetrics"),
    ),
]

PAGE = """\
# Gallery

Eight training scripts from different fields, each without and with Holdfast. For each script you see the lines that
change, a run that SIGKILL ends between two checkpoints, and the same command, which continues the run. The scripts
generate their data; nothing is downloaded.

| script | changed lines | steps | needs |
|---|---|---|---|
{rows}

Each killed run below ended with the same bytes as a run that was never killed. The tests train a shorter run of each
script, kill it once, stop it once, and compare the bytes in the same way. Except where a section says otherwise, the
weights of these runs equal the weights of the script without Holdfast, bit for bit.

To try a script, clone the repository, call `make setup`, and start the command that the script's section shows. Kill
the command in any way, and start it again.

In the pictures the killed run is blue up to its last checkpoint, and orange from there on.

{sections}
## Where to read on

- [convert.md](convert.md): change your own script; `holdfast convert` prints the diff.
- [your-own-loop.md](your-own-loop.md): what a run keeps, and what it refuses.
- [trainer.md](trainer.md), [torchtitan.md](torchtitan.md): the loops of other libraries.

`python -m tests.support.gallery` records the runs, and `make docs` makes this page.
"""

SECTION = """\
## {title}

{text}

![{alt}](../examples/gallery/recorded/{name}.svg)

The script [without Holdfast](../examples/gallery/plain/{name}.py) and
[with Holdfast](../examples/gallery/{name}.py), and its [configuration](../examples/gallery/{name}.toml).

```diff
{diff}
```

```
{transcript}
```
"""


# ---- the page


def make_gallery() -> str:
    """Return docs/gallery.md."""
    rows = "\n".join(map(make_row, ENTRIES))
    return PAGE.format(rows=rows, sections="\n".join(map(make_section, ENTRIES)))


def make_row(entry: Entry) -> str:
    changed = count_changed(*find_pair(entry.name))
    steps = re.findall(r"of (\d+)$", (RECORDED / f"{entry.name}.txt").read_text("utf-8"), re.M)[0]
    needs = ", ".join(f"`{name.replace('_', '-')}`" for name in entry.needs)
    return f"| [{entry.title}](#{entry.anchor}) | {changed} | {steps} | {needs or 'torch alone'} |"


def make_section(entry: Entry) -> str:
    return SECTION.format(
        title=entry.title, text=entry.text, name=entry.name, diff="\n".join(diff(*find_pair(entry.name))),
        transcript=(RECORDED / f"{entry.name}.txt").read_text("utf-8").rstrip(),
        alt=f"The curves of two runs of {entry.name}: killed in step {entry.kill} and continued, and never killed",
    )  # fmt: skip


# ---- commands that a nursery forks


def train(path: str, settings: list[str]) -> int:
    """Do as `tests.support.stopped.train`, in the configuration's folder: a script writes its weights there."""
    os.chdir(Path(path).parent)
    return stopped.train(path, settings)


def run_plain(name: str, length: int, folder: str) -> int:
    """Run a script without Holdfast in a folder, with so many epochs; or steps, if it counts these."""
    text, count = LENGTH.subn(rf"\g<1>{length}", (PLAIN / f"{name}.py").read_text("utf-8"))
    assert count == 1
    os.chdir(folder)
    (path := Path(f"plain_{name}.py")).write_text(text, "utf-8")
    return forked.run_script(str(path))


# ---- the recorded runs


def record(entry: Entry, nursery: Lives, scratch: Path) -> None:
    """Train a script straight, and killed and continued; write what the commands print, and the picture."""
    journals, said = {}, []
    for word in ("straight", "killed"):
        folder = scratch / f"{entry.name}-{word}"
        folder.mkdir()
        config = Path(shutil.copy(GALLERY / f"{entry.name}.toml", folder))
        if word == "killed":
            strike = {STOP: f"SIGKILL:{entry.kill}:{folder}/struck"}
            done = nursery.call(COMMAND, str(config), ["log.every=1"], **strike)
            assert done.returncode == -9, done.stderr
            said.append([*shorten(done.stderr), "Killed"])
        done = nursery.call(COMMAND, str(config), ["log.every=1"])
        assert done.returncode == 0, done.stderr
        journals[word] = Journal(open_store(str(folder / "runs")), entry.run)
    said.append(shorten(done.stderr + done.stdout))
    straight, killed = (journals[word].newest() for word in ("straight", "killed"))
    assert straight
    assert killed
    assert killed.checkpoint_sha256 == straight.checkpoint_sha256
    command = f"$ .venv/bin/holdfast train examples/gallery/{entry.name}.toml"
    text = "\n".join(line for lines in said for line in [command, *lines])
    (RECORDED / f"{entry.name}.txt").write_text(f"{text}\n", "utf-8")
    curves = {word: list(read_curve(journal, entry.plotted[0])) for word, journal in journals.items()}
    picture = draw(Curve(entry.plotted[1], curves["straight"], curves["killed"], entry.kill, killed.step))
    (RECORDED / f"{entry.name}.svg").write_text(picture, "utf-8")


def shorten(text: str) -> list[str]:
    """Return the lines that a command has printed, without most chunks and without steps per second."""
    lines = [line for line in text.splitlines() if not line.startswith("step ")]
    chunks = [number for number, line in enumerate(lines) if line.startswith("chunk ")]
    hidden = chunks[SHOWN_CHUNKS:-1]
    return [
        "..." if number == hidden[0] else line
        for number, line in enumerate(lines)
        if number not in hidden[1:]
    ] if len(hidden) > 1 else lines  # fmt: skip


def read_curve(journal: Journal, name: str) -> Iterator[tuple[int, float, int]]:
    """Yield the step, the logged value and the attempt of each line of a run's trail that has the value."""
    for number in journal.numbers("commits"):
        commit = journal.read_commit(number)
        for text in journal.store.read(f"metrics/{number:08d}.jsonl").splitlines():
            line = json.loads(text)
            value = line["loss"] if name == "loss" else line.get("logged", {}).get(name)
            if value is not None:
                yield line["step"], value, commit.attempt


def main(names: list[str]) -> None:
    """Record scripts; all of them if none is named."""
    RECORDED.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="holdfast-") as scratch, lives() as nursery:
        for entry in ENTRIES:
            if not names or entry.name in names:
                for module in entry.late:
                    nursery.load(module)
                record(entry, nursery, Path(scratch))
                print(entry.name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
