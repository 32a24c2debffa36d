"""The check that steps add and remove no layers or tensors: a resumed model has only what the recipe builds."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from holdfast.checkpoint import shorten
from holdfast.errors import RecipeError
from holdfast.provenance.location import find_place

# The largest number of names in one message.
SHOWN_NAMES = 3


class Structure:
    """The classes of all layers, the names of all parameters and saved buffers, and which parameters are tied.

    Args:
        modules: the modules, by the prefix of their layers' names.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._built, self._dtypes = self._describe(), self._list_dtypes()
        self._look()

    def check(self, step: int) -> bool:
        """Check the modules. Return whether any layer or tensor is a new object, or has a different dtype.

        Modules whose own code loads their ``state_dict`` aren't checked, because this code may build missing layers.

        Raises:
            RecipeError: a step has built or removed layers or tensors, has tied parameters, or has changed the dtype of
                one: no resume could restore such a state.
        """
        if self._is_as_seen():
            return False
        self._look()
        now, built = self._describe(), self._built
        found = sorted(name for name in now.keys() | built.keys() if now.get(name) != built.get(name))
        if not found:
            self._check_dtypes(step)
            return True
        tensors = [name for name in found if not isinstance(now.get(name, built.get(name)), type)]
        is_new = any((name in now) != (name in built) for name in tensors)
        how = "different tensors than" if is_new else "different layers, or different ties between tensors, than"
        found = tensors or found
        raise RecipeError(
            f"{find_place()}after step {step} the model has {how} when the loop began: {shorten(found, SHOWN_NAMES)}; "
            "a resume would build the model as it was then",
            hint="build all layers, adapters and ties before the first step, and let a kept number say how many the "
            "model uses",
        )

    def _check_dtypes(self, step: int) -> None:
        now = self._list_dtypes()
        other = next((name for name, dtype in self._dtypes.items() if now[name] != dtype), None)
        if other is not None:
            raise RecipeError(
                f"{find_place()}after step {step} {other} is {now[other]}, and was {self._dtypes[other]} when the loop "
                "began: a run that resumes builds the parameter as it was, and would round it",
                hint="build the model with one dtype, and change the precision with torch.autocast",
            )

    def _list_dtypes(self) -> dict[str, Any]:
        """Return the dtypes of all parameters, by name."""
        found = [each.named_parameters(prefix=name) for name, each in self._modules.items()]
        return {name: parameter.dtype for each in found for name, parameter in each}

    def _describe(self) -> dict[str, Any]:
        """Return what `check` compares, by name: a layer's class, a parameter's first name, or "" for a saved buffer.

        A tied parameter has several names, of which one is its first name. A parameter that is None is left out. A
        buffer that is None is included, because a step may set it.
        """
        found: dict[str, Any] = {}
        for first, root in self._modules.items():
            names: dict[int, str] = {}
            for prefix, module in root.named_modules(prefix=first, remove_duplicate=False):
                dot = f"{prefix}." if prefix else ""
                # A lazy layer becomes an ordinary layer in the first step: take the later class.
                found[prefix] = getattr(module, "cls_to_become", None) or type(module)
                for name, each in module._parameters.items():
                    if each is not None:
                        found[f"{dot}{name}"] = names.setdefault(id(each), f"{dot}{name}")
                found |= {f"{dot}{name}": "" for name in module._buffers.keys() - module._non_persistent_buffers_set}
        return found

    def _look(self) -> None:
        """Remember which layers, tensors and dtypes the modules have, for `_is_as_seen`."""
        self._all = [each for root in self._modules.values() for each in root.modules()]
        self._seen = self._list_parts()

    def _is_as_seen(self) -> bool:
        """Return whether the modules have the same objects as at the last `_look`."""
        now = self._list_parts()
        return len(now) == len(self._seen) and all(one is other for one, other in zip(now, self._seen, strict=True))

    def _list_parts(self) -> list[Any]:
        return [
            part
            for module in self._all
            for part in (
                *module._modules.values(),
                *module._parameters.values(),
                *(getattr(each, "dtype", None) for each in module._parameters.values()),
                *module._buffers,
            )
        ]


def has_own_loading(model: nn.Module) -> bool:
    """Return whether a module saves or loads its ``state_dict`` with code that isn't torch's own."""
    if getattr(model.load_state_dict, "__func__", None) is not nn.Module.load_state_dict:
        return True
    methods = ("state_dict", "_save_to_state_dict", "_load_from_state_dict", "get_extra_state", "set_extra_state")
    hooks = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    return any(
        any(not getattr(type(module), name).__module__.startswith("torch.") for name in methods)
        or any(not _is_torchs(hook) for name in hooks for hook in getattr(module, name).values())
        for module in model.modules()
    )


def _is_torchs(hook: Any) -> bool:
    """Return whether a hook is torch's own: the hook of a lazy layer or of a parametrization."""
    inner = getattr(hook, "hook", hook)
    return str(getattr(inner, "__module__", "")).startswith("torch.")
