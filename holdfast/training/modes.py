"""The changes of modules and optimizers since they were built, which no ``state_dict`` has."""

from typing import Any

from torch import nn

from holdfast.errors import StateError
from holdfast.hyperparameters import is_hyperparameter
from holdfast.training.optimizers import parts_of


class Modes:
    """The changes of modules and optimizers since the function built them, beside their tensors.

    The state has which modules are in evaluation mode, as a step may end in the middle of a user's evaluation, which
    parameters have been frozen or unfrozen, and the public attributes with a plain value that have another one.
    """

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self._model, self._optimizer = model, optimizer
        self._tensors = self._list_tensors()
        self._frozen = self._list_frozen()
        self._values = self._list_values()

    def find_new_tensors(self) -> list[str]:
        """Return the names of the tensors that the modules have and didn't have, or had and don't have any more."""
        return sorted(self._tensors ^ self._list_tensors())

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "eval": sorted(name for name, module in self._model.named_modules() if not module.training)
        }
        if (frozen := self._list_frozen()) != self._frozen:
            state["frozen"] = frozen
        if values := self._list_changed():
            state["values"] = values
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        evaluated, frozen = {*state["eval"]}, {*state.get("frozen", self._frozen)}
        objects = self._list_objects()
        for name, module in self._model.named_modules():
            if module.training == (name in evaluated):  # torch.compile compiles again if a module's dict is written to
                module.training = name not in evaluated
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad == (name in frozen):
                parameter.requires_grad_(name not in frozen)
        values = state.get("values", {})
        for name, changed in self._list_changed().items():
            for key in changed.keys() - values.get(name, {}).keys():
                if key in self._values[name]:
                    setattr(objects[name], key, self._values[name][key])
                else:
                    delattr(objects[name], key)
        for name, changed in values.items():
            if name not in objects:
                raise StateError(
                    f"{name}, which has another {', '.join(changed)} than it was built with, is not there now"
                )
            for key, value in changed.items():
                setattr(objects[name], key, value)

    def _list_tensors(self) -> set[str]:
        """Return the names of all parameters and saved buffers, also of those that are None."""
        return {
            f"{prefix}.{name}" if prefix else name
            for prefix, module in self._model.named_modules()
            for name in (*module._parameters, *(module._buffers.keys() - module._non_persistent_buffers_set))
        }

    def _list_frozen(self) -> list[str]:
        return sorted(name for name, each in self._model.named_parameters() if not each.requires_grad)

    def _list_values(self) -> dict[str, dict[str, Any]]:
        return {
            name: {key: value for key, value in vars(each).items() if is_hyperparameter(key, value)}
            for name, each in self._list_objects().items()
        }

    def _list_objects(self) -> dict[str, Any]:
        optimizers = {f"optimizer {number}": part for number, part in enumerate(parts_of(self._optimizer))}
        return {**dict(self._model.named_modules()), **optimizers}

    def _list_changed(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for name, values in self._list_values().items():
            built = self._values.get(name, {})
            changed = {
                key: value for key, value in values.items() if key not in built or not _is_equal(value, built[key])
            }
            if changed:
                found[name] = changed
        return found


def _is_equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or (one != one and other != other))
