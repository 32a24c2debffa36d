"""The generator of loops that each hide a value from their checkpoints: a place, a kind of value, and a reader.

The parts of a program are texts, so that a test can paste a remedy into it.
"""

from dataclasses import dataclass

# The line of a loop before which a remedy is pasted.
HERE = "    # here"

# For each kind of value: how to make it, how a step changes it, and how to read a number from it.
KINDS = {
    "number": ("0.0", "{it} += 1.0", "{it}"),
    "list": ("[0.0]", "{it}.append(1.0)", "float(len({it}))"),
    "dict": ("dict(n=0.0)", "{it}.update(n={it}['n'] + 1)", "{it}['n']"),
    "tensor": ("torch.zeros(1)", "{it}.add_(1)", "{it}.sum().item()"),
    "module": ("nn.Linear(1, 1)", "{it}.weight.data.add_(1)", "{it}.weight.sum().item()"),
    "generator": ("torch.Generator()", "torch.rand(1, generator={it})", "float({it}.get_state()[:64].sum())"),
}

# For each place: the code at the top of the module, the code before the loop, the code of a step that changes the
# value, and an expression that reads the value. ``MAKE``, ``CHANGE(x)`` and ``READ(x)`` stand for a kind's texts.
PLACES = {
    "variable": (
        "",
        "it = MAKE",
        "CHANGE(it)",
        "READ(it)",
    ),
    "module global": (
        """\
it = MAKE
def change():
    global it
    CHANGE(it)
""",
        "",
        "change()",
        "READ(it)",
    ),
    "global of a helper": (
        """\
it = MAKE
def change():
    global it
    CHANGE(it)
def read():
    return READ(it)
""",
        "",
        "change()",
        "read()",
    ),
    "method": (
        """\
class Box:
    def __init__(self):
        self.it = MAKE
    def change(self):
        CHANGE(self.it)
    def read(self):
        return READ(self.it)
""",
        "box = Box()",
        "box.change()",
        "box.read()",
    ),
    "method without gradients": (
        """\
class Box:
    def __init__(self):
        self.it = MAKE
    @torch.no_grad()
    def change(self):
        CHANGE(self.it)
    @torch.inference_mode(False)
    def read(self):
        return READ(self.it)
""",
        "box = Box()",
        "box.change()",
        "box.read()",
    ),
    "method that the user's decorator wraps": (
        """\
def timed(function):
    @functools.wraps(function)
    def call(*args):
        return function(*args)
    return call
class Box:
    def __init__(self):
        self.it = MAKE
    @timed
    def change(self):
        CHANGE(self.it)
""",
        "box = Box()",
        "box.change()",
        "READ(box.it)",
    ),
    "method that is wrapped without functools.wraps": (
        """\
def timed(function):
    def call(*args):
        return function(*args)
    return call
class Box:
    def __init__(self):
        self.it = MAKE
    @timed
    def change(self):
        CHANGE(self.it)
""",
        "box = Box()",
        "box.change()",
        "READ(box.it)",
    ),
    "property": (
        """\
class Box:
    def __init__(self):
        self._it = MAKE
    @property
    def it(self):
        CHANGE(self._it)
        return READ(self._it)
""",
        "box = Box()",
        "box.it",
        "box.it",
    ),
    "static method": (
        """\
it = MAKE
class Box:
    @staticmethod
    def change():
        global it
        CHANGE(it)
    @staticmethod
    def read():
        return READ(it)
""",
        "box = Box()",
        "box.change()",
        "box.read()",
    ),
    "class method": (
        """\
class Box:
    it = MAKE
    @classmethod
    def change(cls):
        CHANGE(cls.it)
    @classmethod
    def read(cls):
        return READ(cls.it)
""",
        "box = Box()",
        "box.change()",
        "box.read()",
    ),
    "class without an object": (
        """\
class Box:
    it = MAKE
    @classmethod
    @torch.no_grad()
    def change(cls):
        CHANGE(cls.it)
""",
        "",
        "Box.change()",
        "READ(Box.it)",
    ),
    "set from outside": (
        """\
class Box:
    def __init__(self):
        self.it = MAKE
""",
        "box = Box()",
        "CHANGE(box.it)",
        "READ(box.it)",
    ),
    "closure": (
        """\
def make():
    it = MAKE
    def change():
        nonlocal it
        CHANGE(it)
        return READ(it)
    return change
""",
        "change = make()",
        "change()",
        "change()",
    ),
    "list in a closure": (
        """\
def make():
    some = [MAKE]
    def change():
        CHANGE(some[0])
        return READ(some[0])
    return change
""",
        "change = make()",
        "change()",
        "change()",
    ),
    "dict in a closure": (
        """\
def make():
    some = dict(it=MAKE)
    def change():
        CHANGE(some['it'])
        return READ(some['it'])
    return change
""",
        "change = make()",
        "change()",
        "change()",
    ),
    "default": (
        """\
def change(some=[MAKE]):
    CHANGE(some[0])
    return READ(some[0])
""",
        "",
        "change()",
        "change()",
    ),
    "dataset": (
        """\
class Data(Points):
    def __init__(self):
        self.it = MAKE
    def __getitem__(self, index):
        CHANGE(self.it)
        return super().__getitem__(index)
""",
        "points = Data()",
        "",
        "READ(points.it)",
    ),
    "dataset in a loader": (
        """\
class Data(Points):
    def __init__(self):
        self.it = MAKE
    def __getitem__(self, index):
        CHANGE(self.it)
        return super().__getitem__(index) + READ(self.it)
""",
        "points = Data()",
        "",
        "1.0",
    ),
    "dataset in a wrapper": (
        """\
class Data(Points):
    def __init__(self):
        self.it = MAKE
    def __getitem__(self, index):
        CHANGE(self.it)
        return super().__getitem__(index) + READ(self.it)
""",
        "points = torch.utils.data.Subset(Data(), range(64))",
        "",
        "1.0",
    ),
    "collate function": (
        """\
class Collate:
    def __init__(self):
        self.it = MAKE
    def __call__(self, samples):
        CHANGE(self.it)
        return torch.stack(samples) + READ(self.it)
""",
        "collate = Collate()",
        "",
        "1.0",
    ),
    "dataclass": (
        """\
@dataclasses.dataclass
class Box:
    it: object = dataclasses.field(default_factory=lambda: MAKE)
""",
        "box = Box()",
        "CHANGE(box.it)",
        "READ(box.it)",
    ),
    "slots": (
        """\
class Box:
    __slots__ = ('it',)
    def __init__(self):
        self.it = MAKE
""",
        "box = Box()",
        "CHANGE(box.it)",
        "READ(box.it)",
    ),
    "namespace": (
        "",
        "box = types.SimpleNamespace(it=MAKE)",
        "CHANGE(box.it)",
        "READ(box.it)",
    ),
    "attribute of a function": (
        """\
def box():
    CHANGE(box.it)
box.it = MAKE
""",
        "",
        "box()",
        "READ(box.it)",
    ),
    "object of the user's in an object": (
        """\
class Box:
    def __init__(self):
        self.it = MAKE
    @torch.no_grad()
    def change(self):
        CHANGE(self.it)
class Outer:
    def __init__(self):
        self.box = Box()
    def change(self):
        self.box.change()
""",
        "outer = Outer()",
        "outer.change()",
        "READ(outer.box.it)",
    ),
    "object of a library": (
        "",
        """\
box = torch.distributions.Normal(0.0, 1.0)
    box.it = MAKE
""",
        "CHANGE(box.it)",
        "READ(box.it)",
    ),
    "layer of a library": (
        "",
        """\
box = nn.ReLU()
    box.it = MAKE
""",
        "CHANGE(box.it)",
        "READ(box.it)",
    ),
    "kept module": (
        """\
class Net(nn.Linear):
    def __init__(self):
        super().__init__(1, 1)
        self._it = MAKE
    def forward(self, x):
        CHANGE(self._it)
        return super().forward(x)
""",
        """\
model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
""",
        "",
        "READ(model._it)",
    ),
    "hook": (
        "",
        """\
some = [MAKE]
    def note(*_):
        CHANGE(some[0])
    model.register_forward_hook(note)
""",
        "",
        "READ(some[0])",
    ),
    "partial": (
        """\
def add(some):
    CHANGE(some[0])
    return READ(some[0])
""",
        "change = functools.partial(add, [MAKE])",
        "change()",
        "change()",
    ),
}

# For each reader: the code of a step, and the code before the loop. ``READ`` stands for the expression.
READERS = {
    "the loss": ("scale = READ", ""),
    "an evaluation": ("", "def measure(_):\n        return {'it': READ}\n    run.observe(evaluate=measure)"),
    "a helper": ("scale = scaled()", "def scaled():\n        return READ"),
}

PROGRAM = """import dataclasses
import functools
import types

import torch
from torch import nn
from torch.utils.data import DataLoader

import holdfast


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((1,), float(index))


{top}


def train(run: holdfast.Run) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    points, collate = Points(), None
    {before}
    {reader}
    run.keep(model=model, optimizer=optimizer)
{here}
    for step in run.steps(DataLoader(points, batch_size=4, shuffle=True, collate_fn=collate)):
        scale = 1.0
        {step}
        {change}
        optimizer.zero_grad()
        loss = (model(step.batch).square().mean() * scale)
        loss.backward()
        optimizer.step()
        step.log(loss=loss)
"""


@dataclass(frozen=True)
class Hidden:
    """A loop that hides a value: the place, the kind of value and the reader are keys of the tables above."""

    place: str
    kind: str
    reader: str

    def __str__(self) -> str:
        return f"a {self.kind} in: {self.place}; read by {self.reader}"

    def write(self, remedy: str = "") -> str:
        """Return the program's text.

        Args:
            remedy: the line to paste before the loop.
        """
        make, change, read = KINDS[self.kind]

        def fill(text: str) -> str:
            text = text.replace("MAKE", make)
            for name, form in (("CHANGE", change), ("READ", read)):
                parts = text.split(f"{name}(")
                for number in range(1, len(parts)):
                    it, _, rest = parts[number].partition(")")
                    parts[number] = form.format(it=it) + rest
                text = "".join(parts)
            return text

        top, before, changed, expression = (fill(each).rstrip() for each in PLACES[self.place])
        step, reader = (text.replace("READ", expression) for text in READERS[self.reader])
        here = f"    {remedy}" if remedy.startswith(("run", "state")) else HERE
        if remedy.startswith("self."):
            top = top.replace(f"self._it = {make}", remedy)
        return PROGRAM.format(top=top, before=before, reader=reader, here=here, step=step, change=changed)


def list_hidden() -> list[Hidden]:
    """Return all programs."""
    every = [Hidden(place, kind, reader) for place in PLACES for kind in KINDS for reader in READERS]
    # a module in a kept module is kept
    return [each for each in every if (each.place, each.kind) != ("kept module", "module")]
