"""The `Run` that a user's own training function gets."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from holdfast.config import RunConfig
from holdfast.recipe.anneal import Anneal
from holdfast.recipe.probe import Limits
from holdfast.training.own_loop.loop import OwnLoop, Step


class Run:
    """The run that a training function trains. Holdfast makes it, and calls the function with it.

    The function contains the training loop. The function registers all objects on which the next step depends, and
    takes its steps from the run::

        def train(run: holdfast.Run, lr: float = 0.01) -> None:
            model = nn.Linear(2, 1).to(run.device)
            optimizer = torch.optim.Adam(model.parameters(), lr=lr)
            run.keep(model=model, optimizer=optimizer)
            for step in run.steps(per_epoch=100):
                points = torch.randn(32, 2, device=run.device)
                loss = (model(points) - points.sum(1, keepdim=True)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step.log(loss=loss)

    ``recipe = "my_loop.py:train"`` in a configuration names the function; its other parameters get their values from
    ``[settings]``. ``holdfast new my_loop --loop`` writes an example of a function and its configuration.
    """

    config: RunConfig
    """The whole configuration."""
    settings: dict[str, Any]
    """The configuration's ``[settings]``, with the function's own defaults."""
    accelerator: Accelerator
    """accelerate's accelerator for the configuration's device, precision and ranks."""

    def __init__(self, loop: OwnLoop) -> None:
        """Private: Holdfast creates the run."""
        self._loop = loop
        loop.own.append(self)
        self.config, self.settings, self.accelerator = loop.config, loop.settings, loop.accelerator

    # ---- the process

    @property
    def device(self) -> torch.device:
        """Return the device to train on."""
        return torch.device(self.accelerator.device)

    @property
    def rank(self) -> int:
        """Return this process's number among the ranks, from 0."""
        return int(self.accelerator.process_index)

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return int(self.accelerator.num_processes)

    @property
    def mesh(self) -> Any:
        """Return the ranks as a torch ``DeviceMesh`` with the dimensions "replicate", "shard" and "tensor".

        The mesh has the shape ``compute.mesh``. Return None unless ``compute.parallel`` is "fsdp" and there are several
        ranks.
        """
        return self._loop.mesh

    @property
    def data_rank(self) -> int:
        """Return this rank's data rank, from 0. Ranks with equal data ranks train the same samples.

        By default every rank has a different data rank; see `data_parallel`.
        """
        return self._loop.data.number

    @property
    def data_ranks(self) -> int:
        """Return the number of data ranks: the number of all ranks, unless `data_parallel` groups them."""
        return self._loop.data.count

    @property
    def is_rehearsal(self) -> bool:
        """Return whether this process ends after the present step; see `Step.is_rehearsal`."""
        return self._loop.is_rehearsal

    @property
    def batch_number(self) -> int:
        """Return the number of the next batch in its epoch, from 0; after a resume inside an epoch, it isn't 0.

        Number the batches of an epoch with it::

            for epoch in run.epochs(loader):
                for i, batch in enumerate(run.batches(), run.batch_number):
                    ...

        Inside a step it is the number of that step's batch.
        """
        return self._loop.batch_number

    # ---- before the loop

    def data_parallel(self, mesh: Any) -> None:
        """Set which ranks train different samples, for a model that ranks train together.

        By default every rank trains different samples. With tensor, pipeline or context parallelism the ranks of a
        group need the same samples and random numbers::

            mesh = init_device_mesh(run.device.type, (2, 2), mesh_dim_names=("data", "tensor"))
            run.data_parallel(mesh["data"])

        The loader of `steps`, the seeds of all random numbers and `generator` then follow `data_rank`. With
        ``compute.virtual_ranks`` the ranks of one data rank train the same shares. Call it before you draw random
        numbers or cut data. All ranks call it together.

        Args:
            mesh: a torch ``DeviceMesh`` of the data-parallel dimensions alone.

        Raises:
            RecipeError: `mesh` isn't such a mesh; its groups differ in size; or the call comes after the first call of
                `data_parallel` or `generator`, or in the loop.
        """
        self._loop.set_data_parallel(mesh)

    def wrap(
        self, model: torch.nn.Module, *, parallelize: Callable[[Any, Any], object] | None = None
    ) -> torch.nn.Module:
        """Prepare a model that all ranks train together, as ``compute.parallel`` says. Return it on the run's device.

        Several ranks get a DistributedDataParallel around the model ("ddp"), or the model itself, sharded by
        ``fully_shard`` ("fsdp"). No DistributedDataParallel is put around the model in three cases: for a single rank;
        with virtual ranks, because `Step.shares` sums the gradients; and if no parameter requires a gradient. A model
        on torch's meta device gets memory; its modules' ``reset_parameters`` set the values.
        ``compute.mixed_precision`` becomes the forward pass's autocast.

        Build the optimizer from the returned model, and keep the returned model.

        Args:
            parallelize: with "fsdp" on several ranks, a function of the model and `mesh` that shards the model in
                place; by default each block of the model is sharded over the ranks.

        Raises:
            RecipeError: the model is on the meta device, and a module has no ``reset_parameters``.
            ConfigError: ``compute.mesh`` has a dimension "tensor", and there is no ``parallelize``; or ``parallelize``
                doesn't shard the whole model.
        """
        return self._loop.wrap(model, parallelize)

    def keep(self, /, *, leave_out: Sequence[str] = (), **objects: Any) -> None:
        """Register, by name, all objects on which the next step depends.

        Each object is saved with every checkpoint, and restored in place before the first step. An object may be a
        module, an optimizer, a scheduler, a tensor, an array, a dict, list or deque of these, a generator of random
        numbers, or anything with ``state_dict`` and ``load_state_dict``. For modules, optimizers and schedulers a
        checkpoint contains the main rank's state. For all other objects, a checkpoint contains each rank's own state.

        Args:
            leave_out: the names of attributes of these objects, or of items of dicts, that are neither saved nor
                restored, such as the time at which an episode began. No later step may depend on them.

        Raises:
            RecipeError: an object can't be restored in place, its name is taken, or the loop has begun.
        """
        self._loop.keep(objects, leave_out)

    def generator(self, name: str, device: str | torch.device = "cpu") -> torch.Generator:
        """Return a new generator of random numbers, and register it under this name as `keep` does.

        The generator's seed follows from the run's seed, the name and `data_rank`. With virtual ranks all ranks draw
        the same numbers: draw them outside of the loop over a step's shares.
        """
        return self._loop.make_generator(name, device)

    def anneal(self, name: str, anneal: Anneal) -> Anneal:
        """Register an anneal (a number that changes by step) and return it. Its ``value`` is set before every step."""
        return self._loop.add_anneal(name, anneal)

    def observe(
        self,
        *,
        evaluate: Callable[[Any], Mapping[str, Any]] | None = None,
        probe: Callable[[Any], Mapping[str, Any]] | None = None,
        health: Mapping[str, Limits] | None = None,
        measured: tuple[str, ...] = (),
    ) -> None:
        """Set how to evaluate the model. `Recipe` describes ``evaluate``, ``probe``, ``health`` and ``measured``.

        The functions get the kept module, or a ``ModuleDict`` of all kept modules by name.
        """
        observers = {"evaluate": evaluate, "probe": probe, "health": dict(health or {}), "measured": measured}
        self._loop.fields.update(observers)

    # ---- the loop

    def steps(self, loader: Any = None, *, per_epoch: int | None = None) -> Iterator[Step]:
        """Yield the steps to train, from the run's present step to the last.

        Inside a loop over `epochs`, yield only the steps of the epoch.

        Args:
            loader: a torch ``DataLoader``, or an iterable of batches with ``state_dict`` and ``load_state_dict``, for
                `Step.batch`. The batches come in the loader's own order.
            per_epoch: the number of steps of an epoch; by default the loader's length. The run has this number of steps
                times the configuration's ``epochs``.

        Raises:
            RecipeError: no object is kept; the length of an epoch isn't known; the loader's position can't be restored;
                or the function has a second loop.
        """
        return self._loop.give_steps(loader, per_epoch)

    def epochs(self, loader: Any = None, *, per_epoch: int | None = None) -> Iterator[int]:
        """Yield the numbers of the epochs, from the run's present epoch. Use `batches` or `steps` inside.

        Code after the inner loop, at an epoch's end, belongs to the epoch's last step: the save at that end comes after
        this code. The numbers that it logs are recorded with that step, unless the step itself has logged a number of
        the same name; they aren't part of the mean loss.

        Args:
            loader, per_epoch: see `steps`.
        """
        return self._loop.give_epochs(loader, per_epoch)

    def batches(self, data: Any = None, *, batch_size: int | None = None, **options: Any) -> Iterator[Any]:
        """Return an iterator over batches.

        Inside a loop over `epochs`, call it without arguments: the iterator yields the batches of that epoch, from the
        batch with the number `batch_number`. Before a loop over `steps`, call it with a dataset, and pass the iterator
        to `steps`.

        Args:
            data: a map-style or iterable dataset, as `Recipe.data`; only before `steps`.
            batch_size: the number of samples in a batch over all ranks.
            options: ``grad_accum`` (the number of batches in each step, by default 1) and ``collate``, as in `Recipe`.
        """
        return self._loop.give_batches(data, batch_size, options)

    def log(self, **numbers: Any) -> None:
        """Record numbers of this step: ``loss``, ``grad_norm`` and any others.

        Tensors stay on the device until the numbers are read.

        Args:
            numbers: scalars by name; a value of None is left out, with a warning. The mean of ``loss`` is shown, and
                checked against the health limits. All ranks have to log the same names; the mean over the ranks is
                recorded.

        Raises:
            RecipeError: a value isn't a scalar, or no step has begun.
        """
        self._loop.log(numbers)

    def show(self, **shown: str | bytes) -> None:
        """Show texts and pictures of this step to people: in the UI, in ``holdfast show``, in the run's folder.

        Texts and pictures aren't part of the state.

        Args:
            shown: by name, a ``str``, or ``bytes`` of a PNG or an SVG; each of 1 MiB at most. Only what the main rank
                shows is saved.

        Raises:
            RecipeError: a value or a name can't be shown, or no step has begun.
        """
        self._loop.show(shown)

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """Scale the gradient of some parameters down to a norm of at most ``max_norm``. Return the norm before scaling.

        Use it instead of torch's function of this name. For a sharded model, or a pipeline's stage, it takes the norm
        of the whole gradient. With virtual ranks the norm has the same bits on any number of ranks. The norm is a
        scalar on the run's device.
        """
        return self._loop.clip(parameters, max_norm)


def loop_of(run: Run) -> OwnLoop:
    """Return the `OwnLoop` of a `Run`, for the adapters of other frameworks."""
    return run._loop
