"""Make docs/convert.md: what changes in other people's training scripts, as diffs of scripts before and after."""

import difflib
import re
from collections.abc import Iterator
from pathlib import Path

FOREIGN = Path(__file__).parents[1] / "foreign"
GALLERY = Path(__file__).parents[2] / "examples" / "gallery"
# Unchanged lines that a diff shows around a change.
CONTEXT = 2

PAGE = """\
# Convert your loop

To convert a training script, you change a few lines: at most eight in each of the scripts on this page, which our tests
train and kill. The changes are the same in all scripts:

1. Put the code into a function with a parameter annotated as `holdfast.Run`. The command `holdfast train` calls it.
2. Pass all state that the next step depends on to `run.keep(...)`: model, optimizer, scheduler, an average, a replay
   buffer, a count.
3. Let the loop iterate over `run.epochs` and `run.batches`, or over `run.steps`: after a kill these continue at the
   step that the run has reached.
4. Record numbers with `run.log(...)`, for `holdfast show`, the report and metric sinks.
5. Delete the code that saves and restores checkpoints: the run does both.

`holdfast convert train.py` prints these changes, and marks the places where you have to decide. The command reads the
script without executing it. Pass the file that contains the loop; the command doesn't change the modules that this file
imports. `--write` writes the result as `train_held.py` and `train_held.toml` beside the script. `--prove` also proves
the result at once, and names state that the command didn't find. Write the script's own options after `--`, as in
`holdfast convert train.py --prove -- --epochs 3 --device cpu`; the script's other options keep their defaults.

The command also looks into functions that the script defines. The command asks you about a second loop, a loop without
an end, state that another function changes, and variables that a resume inside an epoch would reset. [Public
scripts](#public-scripts) lists the scripts that we have tried.

In a diff, delete the lines that begin with `-`, and add the lines that begin with `+`. The diffs ignore indentation, as
`git diff -w` does.

## An epoch loop

This script distills a large model into a small model. The loop is the usual one: epochs, batches of a `DataLoader`, a
scheduler, an evaluation after each epoch. The whole scripts are
[before/distillation.py](../tests/foreign/before/distillation.py) and
[after/distillation.py](../tests/foreign/after/distillation.py).

{distillation}

The script stores its step count and its best accuracy in a dict, `progress`, so the run can keep both. A plain local
variable, such as `best = 0.0`, would be reset in each new process. [your-own-loop.md](your-own-loop.md#what-to-write)
lists the forms of state that a run can keep.

## What else an epoch loop has

- **A number of epochs.** Set `epochs` in the configuration, and delete the script's own number. Where the script reads
  this number, write `run.config.epochs`. Leave a scheduler's own length, such as `T_max`, as a number in the script.
- **A schedule with an end,** such as `OneCycleLR`. You can't lengthen a run beyond this end by raising `epochs`: the
  schedule is part of the run's state, and `OneCycleLR` raises an error after its last step. To train further, begin a
  new run from the weights, with a cycle of its own: `holdfast train train.toml --set run=second
  --set init_from.run=first`.
- **`SummaryWriter` or `wandb.init`.** Delete them, call `run.log(...)`, and write `sinks = ["tensorboard"]` or `sinks =
  ["wandb"]` under `[log]` in the configuration. Otherwise each resume, and each process of a [rehearsal](concepts.md)
  and of `prove`, begins a new file or a new W&B run. [metrics.md](metrics.md) shows the sinks.
- **A validation that chooses the best weights.** Write a function `validate` that takes the model and returns numbers
  by name, such as `{{"accuracy": 0.97}}`. Call `run.observe(evaluate=validate)` before the loop. The run then calls
  `validate` after each epoch, in `eval()` mode and without gradients, and stores its numbers in the commit.
- **`torch.save` of the best weights.** Write `keep_best = {{ metric = "accuracy", mode = "max" }}` under `[retention]`.
  `validate` must return this metric: a metric that only the loop logs is refused at the end of the first epoch, or
  earlier. `holdfast show first` names the best commit, `holdfast watch first` lists each commit's numbers, and
  `holdfast export first best best.pt --form torch` writes the best weights. If you keep several modules, add `--part
  student`: the file then has the names that `student.load_state_dict` expects, without the prefix `student.`
- **Other files that the script writes.** Expect them to be written more than once: a resume and a
  [rehearsal](../holdfast/RESUME.md#a-rehearsal) repeat some steps, and `prove` runs the script in the current folder.
- **An index of the batches.** Write `enumerate(run.batches(), run.batch_number)`. Without `run.batch_number`, the index
  begins at 0 again after a resume inside an epoch.
- **A sum over an epoch that the script prints,** such as `total += loss.item()`. After a resume inside an epoch a local
  `total` begins at 0, so the script prints only the sum of the later batches. Put the sum into a dict that you pass to
  `run.keep`, and set it to 0 at the epoch's beginning. Or call `run.log(loss=loss)`: the run then prints the right
  mean.
- **Seeds at the top of the module.** Set `seed` in the configuration, or move the calls into the function.
- **A notebook.** Holdfast trains in a separate process, which can't import a cell. Begin the cell with `%%writefile
  train.py`, and run `!holdfast train train.toml`.
- **`print`.** The output goes to `logs/<run>/attempt-<number>.log`.

## nanoGPT

nanoGPT's script has no training function and no `DataLoader`: the script draws its batches at random, the next batch
one step ahead. So `run.steps(per_epoch=...)` counts the steps, and `run.keep` keeps the batch that was drawn ahead. The
whole scripts are [plain/language_model.py](../examples/gallery/plain/language_model.py) and
[language_model.py](../examples/gallery/language_model.py).

{language_model}

## A Hugging Face Trainer

The Trainer runs its own loop; one call replaces `trainer.train()`. Pass to `run.keep` only state that the Trainer
doesn't know, such as the random generator of a custom collator. The whole scripts are
[before/trainer_script.py](../tests/foreign/before/trainer_script.py) and
[after/trainer_script.py](../tests/foreign/after/trainer_script.py).

{trainer_script}

[trainer.md](trainer.md) lists the state that Holdfast saves for a Trainer by itself, and the options that are refused.

## Public scripts

We have tried `holdfast convert` on 23 public training scripts, unchanged, and `prove` killed each result twice, on a
CPU. The data was small and made up: random images in the files of MNIST, EMNIST and CIFAR-10, invented words and names,
a sine for the forecast, a BERT of one layer. We replaced modules that were missing beside a script: pytorch-cifar's
models, the corpus reader of `language_model`, a metric for accelerate's scripts.

- **Proved without any edit: 10.** pytorch/examples `mnist`, `vae` and `mnist_rnn`; yunjey/pytorch-tutorial
  `generative_adversarial_network` and `language_model`; `main.py` of a fork of kuangliu/pytorch-cifar; ng-video-lecture
  `bigram.py`; pytorch_warmup `emnist` and `cifar10`; schedulefree `mnist`.
- **Proved with options that the script needs on this machine, such as `--device cpu`: 7.** pytorch/examples
  `time_sequence_prediction`; accelerate `test_checkpointing.py` and `test_performance.py`; cleanrl `dqn.py`; opacus
  `mnist`, `dcgan` and `char-lstm-classification`, with `--disable-dp`.
- **Proved after we had followed one hint: 5.** pytorch/examples `reinforce.py`, and cleanrl `ppo.py`,
  `ppo_continuous_action.py`, `rpo_continuous_action.py` and `ddpg_continuous_action.py`. The environments of their gym
  versions need `leave_out=["_cached_spec"]` or `leave_out=["_actions"]`.
- **Refused by `convert`: 1.** pytorch/examples `mnist_forward_forward`, where each layer trains itself in a loop of its
  own.

A loop with opacus 1.6's `PrivacyEngine` is proved, too, if you keep `engine.accountant` beside the model and the
optimizer.

## Train the converted script

Beside `train.py`, write `train.toml`. Name the recipe as `module:function`, or as `file.py:function`:

```toml
recipe = "train.py:train"
run = "first"
epochs = 5
```

```sh
holdfast prove train.toml
holdfast train train.toml
```

`prove` trains the first steps twice, once straight and once with kills, and compares the bytes. If you forgot to keep
some state, `prove` names the object and its line. [your-own-loop.md](your-own-loop.md) describes loops in detail.

[gallery.md](gallery.md) shows eight scripts in the same way, for images, diffusion, peft, contrastive text, a graph,
SAC and Lightning. [tests/foreign](../tests/foreign) contains further scripts before and after their conversion:
accelerate, GANs, momentum contrast, PPO, and TRL's `SFTTrainer`. `make docs` generates the diffs on this page from
these scripts.
"""


def make_convert() -> str:
    """Return docs/convert.md."""
    names = ("distillation", "language_model", "trainer_script")
    return PAGE.format(**{name: "\n".join(["```diff", *diff(*find_pair(name)), "```"]) for name in names})


def find_pair(name: str) -> tuple[Path, Path]:
    """Return the paths of a script before and after its conversion, in the gallery or in tests/foreign."""
    if (GALLERY / f"{name}.py").exists():
        return GALLERY / "plain" / f"{name}.py", GALLERY / f"{name}.py"
    return FOREIGN / "before" / f"{name}.py", FOREIGN / "after" / f"{name}.py"


def count_changed(before: Path, after: Path) -> int:
    """Return how many lines differ between two scripts, without indentation, comments and blank lines."""
    lines = (map(str.strip, path.read_text("utf-8").splitlines()) for path in (before, after))
    codes = [[line for line in each if line and not line.startswith("#")] for each in lines]
    found = difflib.SequenceMatcher(None, *codes, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in found if kind != "equal")


def diff(before_path: Path, after_path: Path) -> Iterator[str]:
    """Yield the lines of a script's diff, without regard to indentation."""
    before, after = read(before_path), read(after_path)
    matcher = difflib.SequenceMatcher(None, *([line.strip() for line in lines] for lines in (before, after)), False)
    for group in matcher.get_grouped_opcodes(CONTEXT):
        yield "@@ @@"
        for kind, i1, i2, j1, j2 in group:
            if kind == "equal":
                yield from (f" {line}".rstrip() for line in after[j1:j2])
            else:
                yield from (f"-{line}".rstrip() for line in before[i1:i2])
                yield from (f"+{line}".rstrip() for line in after[j1:j2])


def read(path: Path) -> list[str]:
    """Return a file's lines, with one blank line in the place of several."""
    return re.sub(r"\n{3,}", "\n\n", path.read_text("utf-8")).splitlines()
