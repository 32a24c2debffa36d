"""The interface of extensions: features that the rest of Holdfast doesn't name, and that can be deleted.

An extension is a folder in ``holdfast/extensions``, or a package of somebody else with an entry point in the group
``holdfast.extensions``. Its ``__init__`` makes an `Extension`, which names the extension's functions as text, so that
finding an extension imports none of its code. docs/extending.md shows one.
"""

import functools
import importlib
import logging
import pkgutil
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from holdfast.errors import ConfigError, HoldfastError

if TYPE_CHECKING:
    from holdfast.config import RunConfig

log = logging.getLogger(__name__)

GROUP = "holdfast.extensions"
# The name under which a module has its `Extension`.
ATTRIBUTE = "extension"
HINT = "repair or uninstall the extension's package"


@dataclass(frozen=True)
class Command:
    """A command of ``holdfast``; its module is imported when the command is called.

    Attributes:
        function: the command's function, as ``module:function``.
        summary: the command's line in ``holdfast --help``: the first paragraph of the function's docstring.
        usage: the line that shows how to call the command; made from the function's arguments if empty.
        is_shown: whether ``holdfast --help`` lists the command.
    """

    name: str
    function: str
    summary: str
    usage: str = ""
    is_shown: bool = True


@dataclass(frozen=True)
class Extension:
    """An extension: its name, and what it adds at each point of Holdfast.

    Each function and class is named as ``module:name``.

    Attributes:
        name: the extension's name in messages and in the configuration. Its folder, or its entry point, has the same
            name.
        settings: a subclass of `holdfast.config.Section`: the table ``[extensions.NAME]`` of the configuration. The
            functions `observers`, `admission`, `around` and `watch` get an instance of it as their second argument.
        commands: further commands of ``holdfast``.
        observers: a function that takes the `RunConfig` and returns an attempt's observers; see `Observer`.
        admission: a function that takes the `RunConfig` before an attempt claims the run, before it goes back to an
            earlier commit, and before a node other than node 0 starts ranks. The function returns why this machine may
            not train the run, or an empty text.
        adoption: a function that takes a run's journal, a checkpoint that dead ranks have saved without a commit, and
            the numbers of the attempts of which one has saved it. The function returns why the run may not take the
            checkpoint, or an empty text; the attempt then trains the steps again.
        verdict: a function that takes a run's journal, the verdict of audits on a commit, and what the user asked for:
            ``record``, ``rollback`` or ``stop``. It returns `holdfast.journal.verdict.Consequences`. The command
            ``audit`` calls it if the verdict names a machine, the flow ``audit`` for each verdict.
        around: a function that takes the `RunConfig` and returns a context manager, which is entered around an attempt
            by ``holdfast train``, by the process beside a launcher's ranks, and by Prefect's flow outside a work pool.
            An error that ends the attempt passes through it.
        disruption: a function without arguments, called when an attempt ends early, after its last save. The function
            returns why the platform takes this machine away, or an empty text; the attempt then counts as preempted.
        cooperation: a function that takes the `RunConfig`, the recipe, accelerate's `Accelerator`, and the data ranks
            or None. The function returns a `holdfast.training.cooperation.Cooperation`, with which any number of ranks
            trains the same bytes. It is called if ``compute.virtual_ranks`` is set.
        watch: a function that takes the `RunConfig`, the `holdfast.machine.heartbeats.Heartbeats` of this machine's
            ranks, and a factor for its time limits. The function returns a `holdfast.rank.watches.RankWatch`, which is
            asked once a second whether all ranks are to be replaced.
        launchers: by name, further launchers for ``compute.launcher``, which start the ranks on a cluster's nodes; each
            is a `holdfast.rank.spawn.ClusterLauncher`.
        views: functions that show runs for other programs, such as Prefect's summary, by the view's name. ``loss``
            takes a run's journal and returns an SVG, or an empty text; ``comparison`` takes several journals and
            returns an HTML page; ``receipt`` audits a receipt for ``holdfast audit``, and returns the exit code;
            ``machines`` lists a store's records of refused machines for ``holdfast doctor``, and ``release`` admits
            one again.
    """

    name: str
    settings: str = ""
    commands: tuple[Command, ...] = ()
    observers: str = ""
    admission: str = ""
    adoption: str = ""
    verdict: str = ""
    around: str = ""
    disruption: str = ""
    cooperation: str = ""
    watch: str = ""
    launchers: Mapping[str, str] = field(default_factory=dict)
    views: Mapping[str, str] = field(default_factory=dict)


@functools.cache
def find_extensions() -> tuple[Extension, ...]:
    """Return all extensions: Holdfast's own by their names, then those of other packages.

    Raises:
        ConfigError: an extension can't be imported, or two have one name.
    """
    extensions = [*_find_own(), *_find_foreign()]
    names = [each.name for each in extensions]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"two extensions have the name {name}", hint="uninstall the package of one of the two extensions"
            )
    return tuple(extensions)


def call_all(point: str, config: "RunConfig", *arguments: object) -> Iterator[tuple[str, Any]]:
    """Call the function that each extension has for a point, and yield the extension's name and the result.

    Args:
        point: ``observers``, ``admission``, ``around`` or ``watch``.
        arguments: further arguments of the function.

    Raises:
        ConfigError: a function can't be imported or fails, or an extension's settings are wrong.
    """
    for extension in find_extensions():
        if name := getattr(extension, point):
            settings = [read_table(extension, config)] if extension.settings else []
            yield extension.name, _call(extension, name, config, *settings, *arguments)


def call_each(point: str, *arguments: object) -> Iterator[Any]:
    """Call the function that each extension has for a point about a run's records, and yield the results.

    Args:
        point: ``adoption`` or ``verdict``.

    Raises:
        ConfigError: a function can't be imported or fails.
    """
    for extension in find_extensions():
        if name := getattr(extension, point):
            yield _call(extension, name, *arguments)


def _call(extension: Extension, name: str, *arguments: object) -> Any:
    function = _load(extension, name)
    try:
        return function(*arguments)
    except HoldfastError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"the extension {extension.name}: {name} failed at {frame.filename}:{frame.lineno}: {error or repr(error)}",
            hint=HINT,
        ) from error


def find_disruption() -> str:
    """Return why a platform takes this machine away, or an empty text.

    If an extension fails, log a warning and ask the next one, because an attempt has to record its ending.
    """
    for extension in find_extensions():
        if extension.disruption:
            try:
                if reason := str(_load(extension, extension.disruption)()):
                    return reason
            except Exception as error:
                log.warning(
                    "the extension %s can't say whether this machine will be taken away: %s", extension.name, error
                )
    return ""


def read_table(extension: Extension, config: "RunConfig") -> Any:
    """Return the table ``[extensions.NAME]`` of a configuration as an instance of the extension's class of settings.

    Without a table, return the class's defaults.

    Raises:
        ConfigError: the class can't be imported, or refuses the table.
    """
    kind = _load(extension, extension.settings)
    try:
        return kind.model_validate(config.extensions.get(extension.name, {}))
    except ValidationError as error:
        first = error.errors()[0]
    key = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        # `holdfast.config` is imported late, because the program imports this module for every command.
        from holdfast.config import did_you_mean

        hint = did_you_mean(key, kind.model_fields) if len(first["loc"]) == 1 else ""
        raise ConfigError(f"unknown key extensions.{extension.name}.{key}", hint=hint)
    name = f"{extension.name}.{key}".rstrip(".")
    raise ConfigError(f"extensions.{name}: {first['msg'].removeprefix('Value error, ')}")


def check_tables(config: "RunConfig") -> None:
    """Check that each table ``[extensions.NAME]`` is that of an installed extension, which accepts it.

    Raises:
        ConfigError: a table is wrong, or no installed extension has the launcher.
    """
    if config.compute.has_cluster:
        load_launcher(config.compute.launcher)
    known = {each.name: each for each in find_extensions() if each.settings}
    for name in config.extensions:
        if name not in known:
            raise ConfigError(
                f"extensions.{name}: no installed extension reads this table of the configuration",
                hint=f"known: {', '.join(known) or 'none'}",
            )
        read_table(known[name], config)


def find_view(name: str) -> Callable[..., Any] | None:
    """Import the function of a view; return None if no extension has the view.

    Raises:
        ConfigError: the function can't be imported.
    """
    return next((_load(each, each.views[name]) for each in find_extensions() if name in each.views), None)


def load_point(point: str) -> Callable[..., Any] | None:
    """Import the function that the first extension has for a point; return None if no extension has one.

    Args:
        point: ``cooperation``.

    Raises:
        ConfigError: the function can't be imported.
    """
    return next((_load(each, name) for each in find_extensions() if (name := getattr(each, point))), None)


def load_launcher(name: str) -> Any:
    """Import the launcher of this name.

    Raises:
        ConfigError: no installed extension has it, or it can't be imported.
    """
    known = {each: extension for extension in find_extensions() for each in extension.launchers}
    if name not in known:
        raise ConfigError(
            f'compute.launcher = "{name}": no installed extension has this launcher',
            hint=f"known: {', '.join(['torchrun', *known])}",
        )
    return _load(known[name], known[name].launchers[name])


def _load(extension: Extension, name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the extension {extension.name}: {name} can't be imported: {error}", hint=HINT) from error


def _find_own() -> Iterator[Extension]:
    package = importlib.import_module("holdfast.extensions")
    for module in sorted(pkgutil.iter_modules(package.__path__), key=lambda module: module.name):
        yield getattr(importlib.import_module(f"{package.__name__}.{module.name}"), ATTRIBUTE)


def _find_foreign() -> Iterator[Extension]:
    found: Iterable[EntryPoint] = entry_points(group=GROUP)
    for point in sorted(found, key=lambda point: point.name):
        try:
            extension = point.load()
        except Exception as error:
            raise ConfigError(
                f"the extension {point.name} ({point.value}) can't be imported: {error or repr(error)}",
                hint=HINT,
            ) from error
        if not isinstance(extension, Extension):
            raise ConfigError(
                f"the extension {point.name}: {point.value} is of type {type(extension).__name__}, not Extension",
                hint="holdfast docs extending shows an extension",
            )
        yield extension
