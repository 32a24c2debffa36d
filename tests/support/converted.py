"""Make docs/convert.md: what changes in other people's training scripts, as diffs of the pairs in tests/foreign."""

import difflib
import re
from collections.abc import Iterator
from pathlib import Path

FOREIGN = Path(__file__).parents[1] / "foreign"
# Unchanged lines that a diff shows around a change.
CONTEXT = 2

PAGE = """\
# Convert your loop

Your training script stays as it is, but for a few lines: at most eight in each of these scripts, which tests train and
kill. What you do is the same in all of them:

1. Put the code into a function with a parameter that is annotated as a `holdfast.Run`. The command calls it.
2. `run.keep(...)` names what the next step depends on: model, optimizer, scheduler, an average, a buffer, a count.
3. The loop takes its steps from `run.epochs` and `run.batches`, or from `run.steps`. It begins where the run stands.
4. `run.log(...)` records numbers, so that `holdfast show`, the report and metric sinks have them.
5. Delete the code that saves and restores: the run does both.

The lines that begin with `-` go, those with `+` come. The diffs ignore indentation, as `git diff -w` does.

## An epoch loop

The ordinary loop: epochs, batches of a `DataLoader`, a scheduler, an evaluation after each epoch. Here a small model
learns from a large one. The whole scripts are
[before/distillation.py](../tests/foreign/before/distillation.py) and
[after/distillation.py](../tests/foreign/after/distillation.py).

{distillation}

The count of steps and the best accuracy are in a dict, `progress`, so the run can keep them. A plain local variable,
such as `best = 0.0`, would begin anew in each process: [your-own-loop.md](your-own-loop.md#what-to-write) shows every
form.

## What else an epoch loop has

- **A number of epochs.** `epochs` in the configuration says how long the loop runs. A scheduler's own length, such as
  `T_max`, stays in the script.
- **A validation that chooses the best weights.** Make it a function from the model to numbers by name, such as
  `{{"accuracy": 0.97}}`, and call `run.observe(evaluate=validate)` before the loop. The run calls it after each epoch,
  in `eval()` mode and without gradients. `holdfast show`, the report and each commit have its numbers.
- **`torch.save` of the best weights.** Write `keep_best = {{ metric = "accuracy", mode = "max" }}` under `[retention]`.
  The metric has to be a number of `evaluate`; one that the loop logs isn't enough, and is refused at the latest at the
  end of the first epoch. `holdfast show first` names the best commit, `holdfast watch first` lists each commit's
  numbers, and `holdfast export first best best.pt --form torch` writes the best weights.
- **Other files that the script writes.** A resume may write them again, and so may a
  [rehearsal](../holdfast/RESUME.md#a-rehearsal). `prove` writes them, too: it runs the script in this folder.
- **A sum over an epoch that it prints,** such as `total += loss.item()`. After a resume inside an epoch such a variable
  begins at 0, and the script prints too small a number for this epoch. Keep it in a dict that `run.keep` has, and set
  it to 0 at the epoch's end; or leave the mean to `run.log(loss=loss)`, which the run's own lines have right.
- **Seeds at the top of the module.** Set `seed` in the configuration, or move the calls into the function.
- **`print`.** It goes to `logs/<run>/attempt-<number>.log`.

## nanoGPT

A script without a function, which draws its batches at random and reads the next one ahead. So there is no loader:
`run.steps(per_epoch=...)` counts the steps, and the batch that was read ahead is kept. The whole scripts are
[before/nanogpt.py](../tests/foreign/before/nanogpt.py) and [after/nanogpt.py](../tests/foreign/after/nanogpt.py).

{nanogpt}

## A Hugging Face Trainer

The Trainer keeps its loop; one call replaces `trainer.train()`. What the Trainer doesn't know, such as the generator of
a collator of your own, you keep yourself. The whole scripts are
[before/trainer_script.py](../tests/foreign/before/trainer_script.py) and
[after/trainer_script.py](../tests/foreign/after/trainer_script.py).

{trainer_script}

[trainer.md](trainer.md) says what is kept, and what is refused.

## Train the converted script

Beside `train.py`, write `train.toml`. A recipe is `module:function`, or the path of a file and the function in it:

```toml
recipe = "train.py:train"
run = "first"
epochs = 5
```

```sh
holdfast prove train.toml
holdfast train train.toml
```

`prove` trains the first steps twice, straight and killed, and compares the bytes. If you forgot to keep something, it
names the object and its line. [your-own-loop.md](your-own-loop.md) goes on from here.

[tests/foreign](../tests/foreign) has more pairs: accelerate, a GAN, diffusion, momentum contrast, PPO, Lightning, and
TRL's `SFTTrainer`. `make docs` makes the diffs on this page from them; a test compares.
"""


def make_convert() -> str:
    """Return docs/convert.md."""
    names = ("distillation", "nanogpt", "trainer_script")
    return PAGE.format(**{name: "\n".join(["```diff", *diff(name), "```"]) for name in names})


def diff(name: str) -> Iterator[str]:
    """Yield the lines of a script's diff, without regard to indentation."""
    before, after = (read(FOREIGN / folder / f"{name}.py") for folder in ("before", "after"))
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
