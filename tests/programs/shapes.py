"""Shapes of programs whose steps depend on hidden state: what they build, and what each epoch and step does.

A shape is written once. A variable in braces, such as ``{count}``, is an item of a kept dict in the program that keeps
it, and a plain variable in the program that forgets it. `tests.programs.grid` makes whole programs of them.
"""

from dataclasses import dataclass, field

# Stands for the lines in which a program learns from ``loss``.
LEARN = "LEARN"


@dataclass(frozen=True)
class Shape:
    """The lines of a program that belong to its hidden state.

    Args:
        numbers: the numbers that steps assign, each with its first value; a program keeps them in a dict.
        objects: the names of objects that steps change in place; a program keeps each by its name.
        setup, begin, end: lines before the loop, at each epoch's beginning and at its end. ``P`` is the period, and
            ``N`` is the number of steps in an epoch.
        step: the lines of a step, which has a batch ``x, y``; one of them is `LEARN`.
        index: the number that `enumerate` counts where the program forgets it, and that follows from the step's number
            where the program keeps it.
        zipped: a second loader whose batch is ``z`` in each step: zipped to the first in the program that forgets it,
            and read by the step's number in the program that keeps it.
        classes: the classes of the program. The last one's attributes in ``attributes`` are hidden state, which the
            program saves in a ``state_dict`` of that class, or in buffers where ``BUFFER(name)`` makes them.
        is_recipe: whether the program is a recipe, whose ``after_step`` is the method ``step`` of the last class, in
            place of a loop.
        is_periodic: whether the state repeats after a number of steps, or after an epoch.
    """

    step: str = ""
    numbers: dict[str, str] = field(default_factory=dict)
    objects: tuple[str, ...] = ()
    setup: str = ""
    begin: str = ""
    end: str = ""
    index: str = ""
    zipped: str = ""
    classes: str = ""
    attributes: tuple[str, ...] = ()
    is_recipe: bool = False
    is_periodic: bool = True

    @property
    def state(self) -> tuple[str, ...]:
        """Return the names of all hidden state."""
        named = [each for each in (self.index, self.zipped) if each]
        return (*named, *self.numbers, *self.objects, *self.attributes)


PERIODIC = {
    "accumulates": Shape(
        index="i",
        objects=("total",),
        setup="total = torch.zeros(())",
        step="""
loss = fit(model, x, y)
(loss / P).backward()
total += loss.detach()
if (i + 1) % P == 0:
    optimizer.param_groups[0]["lr"] = 0.05 / (1 + total.item())
    optimizer.step()
    optimizer.zero_grad()
    total.zero_()
""",
    ),
    "sums gradients": Shape(
        numbers={"count": "0"},
        objects=("sums",),
        setup="sums = [torch.zeros_like(each) for each in model.parameters()]",
        step="""
loss = fit(model, x, y)
gradients = torch.autograd.grad(loss, list(model.parameters()))
for total, gradient in zip(sums, gradients):
    total += gradient
{count} += 1
if {count} % P == 0:
    for each, total in zip(model.parameters(), sums):
        each.grad = total / P
        total.zero_()
    optimizer.step()
    optimizer.zero_grad()
""",
    ),
    "looks ahead": Shape(
        numbers={"count": "0"},
        objects=("slow",),
        setup="slow = [each.detach().clone() for each in model.parameters()]",
        step="""
loss = fit(model, x, y)
LEARN
{count} += 1
if {count} % P == 0:
    with torch.no_grad():
        for behind, fast in zip(slow, model.parameters()):
            behind.lerp_(fast, 0.5)
            fast.copy_(behind)
""",
    ),
    "cycles its rate": Shape(
        numbers={"count": "0", "peak": "0.05"},
        step="""
optimizer.param_groups[0]["lr"] = {peak} * (1 + {count} % P)
loss = fit(model, x, y)
LEARN
{count} += 1
if {count} % P == 0:
    {peak} = {peak} * 0.9
""",
    ),
    "trains late": Shape(
        numbers={"waited": "0"},
        objects=("queue",),
        setup="queue = deque(maxlen=P)",
        step="""
queue.append((x, y))
{waited} += 1
if len(queue) == P:
    x, y = queue[0]
loss = fit(model, x, y) * (1 + 0.1 * ({waited} % P))
LEARN
""",
    ),
    "follows a target": Shape(
        numbers={"age": "0"},
        objects=("target",),
        setup="target = copy.deepcopy(model).requires_grad_(False)",
        step="""
loss = fit(model, x, y) + 0.5 * (model(x) - target(x)).square().mean()
LEARN
{age} += 1
if {age} % P == 0:
    target.load_state_dict(model.state_dict())
""",
    ),
    "pulls to an average": Shape(
        numbers={"count": "0"},
        objects=("mean",),
        setup="mean = [each.detach().clone() for each in model.parameters()]",
        step="""
loss = fit(model, x, y)
LEARN
{count} += 1
with torch.no_grad():
    for behind, each in zip(mean, model.parameters()):
        behind.lerp_(each, 0.2)
        if {count} % P == 0:
            each.lerp_(behind, 0.5)
""",
    ),
    "alternates": Shape(
        numbers={"turn": "0"},
        objects=("theirs",),
        setup="""
critic = nn.Linear(1, 1)
run.keep(critic=critic)
theirs = torch.optim.Adam(critic.parameters(), lr=0.05)
""",
        step="""
if {turn} % P == 0:
    doubt = (critic(model(x).detach()) - critic(y) + 1).square().mean()
    theirs.zero_grad()
    doubt.backward()
    theirs.step()
{turn} += 1
loss = fit(model, x, y) + 0.1 * critic(model(x)).square().mean()
LEARN
""",
    ),
    "has patience": Shape(
        numbers={"best": "float('inf')", "bad": "0"},
        step="""
loss = fit(model, x, y)
LEARN
if loss.item() < {best}:
    {best} = loss.item()
else:
    {bad} += 1
if {bad} == P:
    optimizer.param_groups[0]["lr"] *= 0.7
    {bad} = 0
    {best} = loss.item() * 2
""",
    ),
    "scales by a window": Shape(
        numbers={"total": "0.0", "seen": "0", "scale": "1.0"},
        step="""
loss = fit(model, x, y)
{total} += loss.item()
{seen} += 1
if {seen} == P:
    {scale} = 1 + {total} / P
    {total} = 0.0
    {seen} = 0
loss = loss / {scale}
LEARN
""",
    ),
    "draws now and then": Shape(
        numbers={"count": "0"},
        objects=("noise", "generator"),
        setup="""
noise = torch.zeros(4)
generator = torch.Generator().manual_seed(5)
""",
        step="""
if {count} % P == 0:
    noise.copy_(torch.randn(4, generator=generator))
{count} += 1
loss = fit(model, x + 0.3 * noise, y)
LEARN
""",
    ),
    "replays": Shape(
        numbers={"count": "0"},
        objects=("memory",),
        setup="memory = []",
        step="""
{count} += 1
memory.append((x, y))
if len(memory) > 6:
    memory.pop(0)
loss = fit(model, x, y)
if {count} % P == 0:
    old_x, old_y = memory[0]
    loss = loss + fit(model, old_x, old_y)
LEARN
""",
    ),
}

AHEAD = """
class Lookahead:
    def __init__(self, model):
        self.model = model
        self.count = 0
        self.slow = [each.detach().clone() for each in model.parameters()]

    @torch.no_grad()
    def step(self):
        self.count += 1
        if self.count % P == 0:
            for behind, fast in zip(self.slow, self.model.parameters()):
                behind.lerp_(fast, 0.5)
                fast.copy_(behind)
"""

IN_CLASSES = {
    "looks ahead in an object": Shape(
        classes=AHEAD,
        attributes=("count", "slow"),
        setup="ahead = Lookahead(model)",
        step="loss = fit(model, x, y)\nLEARN\nahead.step()",
    ),
    "looks ahead in a recipe": Shape(
        classes=AHEAD, attributes=("count", "slow"), setup="ahead = Lookahead(model)", is_recipe=True
    ),
    "counts in a layer": Shape(
        classes="""
class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        BUFFER(calls)
        BUFFER(level)

    def forward(self, x):
        if self.training:
            self.calls += 1
            if self.calls % P == 0:
                self.level += 0.05
        return x + self.level * torch.sin(x)
""",
        attributes=("calls", "level"),
        setup="model.append(Noisy())",
        step="loss = fit(model, x, y)\nLEARN",
    ),
}

OF_AN_EPOCH = {
    "lowers its rate": Shape(
        index="i",
        numbers={"floor": "0.001"},
        step="""
optimizer.param_groups[0]["lr"] = {floor} + 0.05 / (1 + i)
loss = fit(model, x, y)
LEARN
{floor} = {floor} * 1.02
""",
    ),
    "zips a loader": Shape(
        zipped="other",
        numbers={"trust": "0.1"},
        setup="other = [torch.randn(8, 4, generator=torch.Generator().manual_seed(each)) for each in range(N)]",
        step="""
loss = fit(model, x, y) + {trust} * model(z).square().mean()
LEARN
{trust} = {trust} * 1.02
""",
    ),
    "carries a hidden state": Shape(
        numbers={"hidden": "torch.zeros(8, 4)", "cell": "torch.zeros(8, 4)"},
        setup="""
rnn = nn.LSTMCell(4, 4)
run.keep(rnn=rnn)
""",
        begin="""
{hidden}, {cell} = torch.zeros(8, 4), torch.zeros(8, 4)
""",
        step="""
out, new = rnn(x, ({hidden}, {cell}))
{hidden}, {cell} = out.detach(), new.detach()
loss = fit(model, x + out, y)
LEARN
""",
    ),
    "counts anew": Shape(
        numbers={"seen": "0", "total": "0.0"},
        begin="""
{seen} = 0
{total} = 0.0
""",
        step="""
loss = fit(model, x, y)
{seen} += 1
{total} += loss.item()
loss = loss / (1 + {total} / {seen})
LEARN
""",
    ),
    "judges the epoch": Shape(
        numbers={"total": "0.0", "seen": "0", "best": "float('inf')"},
        begin="""
{total} = 0.0
{seen} = 0
""",
        step="""
loss = fit(model, x, y)
LEARN
{total} += loss.item()
{seen} += 1
""",
        end="""
optimizer.param_groups[0]["lr"] *= 0.5 if {total} / max({seen}, 1) > 0.9 * {best} else 1.1
{best} = min({best}, {total} / max({seen}, 1))
""",
    ),
    "draws a strength": Shape(
        numbers={"strength": "0.0", "sign": "1"},
        begin="""
{strength} = torch.rand(()).item()
{sign} = random.choice([-1, 1])
""",
        step="""
loss = fit(model, x + {sign} * {strength}, y)
LEARN
""",
    ),
    "shuffles an order": Shape(
        objects=("order",),
        numbers={"place": "0"},
        setup="order = torch.arange(N)",
        begin="""
order.copy_(torch.randperm(N))
{place} = 0
""",
        step="""
loss = fit(model, x + 0.1 * order[{place}], y)
{place} += 1
LEARN
""",
    ),
    "collects hard samples": Shape(
        objects=("hard", "scores"),
        setup="""
hard = []
scores = []
""",
        begin="""
hard.clear()
scores.clear()
""",
        step="""
loss = fit(model, x, y)
scores.append(loss.item())
if loss.item() >= max(scores):
    hard.append((x, y))
if hard:
    loss = loss + 0.5 * fit(model, *hard[0])
LEARN
""",
    ),
}

# Programs that forget nothing.
WITHOUT = {
    "learns": Shape(step="loss = fit(model, x, y)\nLEARN", is_periodic=False),
    "prints the mean": Shape(
        begin="running = 0.0\nseen = 0",
        step="loss = fit(model, x, y)\nLEARN\nrunning += loss.item() * len(x)\nseen += len(x)",
        end='print(f"epoch {epoch}: {running / seen:.4f}")',
        is_periodic=False,
    ),
    "prints the last loss": Shape(
        step="loss = fit(model, x, y)\nLEARN",
        end='print(f"epoch {epoch}: {loss.item():.4f}")',
        is_periodic=False,
    ),
    "prints by index": Shape(
        index="i",
        step="loss = fit(model, x, y)\nLEARN\nif i % 4 == 0:\n    print(i, loss.item())",
        is_periodic=False,
    ),
    "steps a scheduler": Shape(
        setup="scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)\nrun.keep(scheduler=scheduler)",
        step="loss = fit(model, x, y)\nLEARN",
        end="scheduler.step()",
        is_periodic=False,
    ),
    "validates": Shape(
        setup="""
def validate(model):
    with torch.no_grad():
        return {"error": fit(model, torch.ones(2, 4), torch.ones(2, 1)).item()}

run.observe(evaluate=validate)
""",
        begin="model.train()",
        step="loss = fit(model, x, y)\nLEARN\nnn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        end='model.eval()\nprint(f"epoch {epoch}: {validate(model)}")',
        is_periodic=False,
    ),
}

SHAPES = PERIODIC | IN_CLASSES | OF_AN_EPOCH | WITHOUT
