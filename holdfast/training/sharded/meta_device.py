"""Models that a recipe builds on torch's meta device, which have shapes and no memory."""

from torch import device, empty_like, nn

from holdfast.errors import RecipeError


def materialize(model: nn.Module, place: device, made: dict[int, nn.Parameter]) -> None:
    """Give memory and first values to all parameters and buffers of a model that are on the meta device.

    The modules' ``reset_parameters`` set the values, in the order of ``modules()``, as when torch builds them.

    Args:
        place: the device for the memory.
        made: the parameters that stand for those on the meta device, by the id of the latter; tied ones stay tied.

    Raises:
        RecipeError: a module with such parameters or buffers has no ``reset_parameters``.
    """
    for name, module in model.named_modules():
        parameters = {key: each for key, each in module._parameters.items() if each is not None and each.is_meta}
        buffers = {key: each for key, each in module._buffers.items() if each is not None and each.is_meta}
        if not parameters and not buffers:
            continue
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            raise RecipeError(
                f"the model's {name or 'own tensors'} ({type(module).__qualname__}) has no values: it was built on the "
                "meta device and has no reset_parameters()",
                hint="give it a method reset_parameters(), which sets its parameters and buffers",
            )
        for key, parameter in parameters.items():
            if id(parameter) not in made:
                memory = empty_like(parameter.detach(), device=place)
                made[id(parameter)] = nn.Parameter(memory, requires_grad=parameter.requires_grad)
            module._parameters[key] = made[id(parameter)]
        for key, buffer in buffers.items():
            module._buffers[key] = empty_like(buffer, device=place)
        reset()
