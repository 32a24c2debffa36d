"""The variables that a function carries from one iteration of its loop to the next, found in its bytecode.

A checkpoint restores objects, not variables. If an iteration reads a variable before assigning it, the variable has a
different value after a resume, unless its object is kept. The search takes place while the function runs its loop: the
instruction that is running shows which loop to examine.
"""

import bisect
import dis
import functools
import types
from collections.abc import Iterable
from dataclasses import dataclass, field

JUMPS = {"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE"}
ENDS = {"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"}
LOCAL = ("FAST", "DEREF", "CLOSURE")


@dataclass
class _Instruction:
    """One instruction of a function.

    Attributes:
        line: the instruction's line in the source.
        nexts: the offsets of the instructions that may follow this one.
        reads, stores: the variables that the instruction reads and assigns, and attributes of variables: ``self.best``.
    """

    line: int
    nexts: list[int] = field(default_factory=list)
    reads: set[str] = field(default_factory=set)
    stores: set[str] = field(default_factory=set)


def find_carried(frame: types.FrameType) -> dict[str, int] | None:
    """Return the variables and attributes that one iteration of a running function's loop leaves to the next.

    The result has, by name, the line that first reads the variable. Variables that the loop reads and never assigns are
    included.
    Return None if the function isn't inside a loop.
    """
    places, at, loop = _find_loop(frame)
    return {name: _first_line(places, loop, name) for name in _find_live(places, loop)[at]} if loop else None


def find_constants(frame: types.FrameType) -> set[str]:
    """Return the variables that the loop of a running function reads and never assigns."""
    places, at, loop = _find_loop(frame)
    stored = set[str]().union(*(places[each].stores for each in loop))
    return {name for name in _find_live(places, loop)[at] if "." not in name} - stored if loop else set()


def find_outputs(codes: Iterable[types.CodeType]) -> set[str]:
    """Return the attributes that every method of a class assigns before it reads them: no step needs old values.

    ``__init__`` doesn't count: an attribute that only this method assigns may be read and changed by code outside of
    the class.
    """
    stored, read = set[str](), set[str]()
    for code in codes:
        if code.co_name == "__init__":
            continue
        own = f"{code.co_varnames[0]}." if code.co_argcount else "."
        places = _read_places(code)
        live = _find_live(places, {*places})[min(places)]
        stored |= {name.removeprefix(own) for each in places.values() for name in each.stores if name.startswith(own)}
        read |= {name.removeprefix(own) for name in live if name.startswith(own)}
        # A string may be an attribute's name, as in `getattr(self, "count", 0)`. So count each string as a read of this
        # attribute.
        read |= {each for each in code.co_consts if isinstance(each, str)}
    return stored - read


def _find_loop(frame: types.FrameType) -> tuple[dict[int, _Instruction], int, set[int]]:
    """Return a function's instructions, the offset of the running instruction, and the offsets of the loop around it.

    If the function isn't inside a loop, the set of offsets is empty.
    """
    places = _read_places(frame.f_code)
    offsets = sorted(places)
    at = offsets[max(0, bisect.bisect_right(offsets, frame.f_lasti) - 1)]
    befores: dict[int, list[int]] = {}
    for offset, place in places.items():
        for each in place.nexts:
            befores.setdefault(each, []).append(offset)
    after = _reach(at, {offset: place.nexts for offset, place in places.items()})
    return places, at, after & _reach(at, befores)


def _reach(start: int, nexts: dict[int, list[int]]) -> set[int]:
    """Return the instructions that may run after `start`; among them `start` itself only if it is on a cycle."""
    found: set[int] = set()
    waiting = [*nexts.get(start, ())]
    while waiting:
        if (each := waiting.pop()) not in found:
            found.add(each)
            waiting += nexts.get(each, ())
    return found


def _find_live(places: dict[int, _Instruction], among: set[int]) -> dict[int, set[str]]:
    """Return, for each instruction in `among`, the live variables: names that may be read before they are assigned."""
    live: dict[int, set[str]] = {each: set() for each in among}
    is_changed = True
    while is_changed:
        is_changed = False
        for offset in sorted(among, reverse=True):
            later = set[str]().union(*(live[each] for each in places[offset].nexts if each in among))
            now = places[offset].reads | (later - places[offset].stores)
            is_changed |= now != live[offset]
            live[offset] = now
    return live


def _first_line(places: dict[int, _Instruction], loop: set[int], name: str) -> int:
    return next((places[each].line for each in sorted(loop) if name in places[each].reads), 0)


@functools.cache
def _read_places(code: types.CodeType) -> dict[int, _Instruction]:
    """Return a function's instructions, by their offsets in the bytecode."""
    instructions = [each for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG"]
    offsets = [each.offset for each in instructions]
    ends = {each.offset: each.argval for each in instructions if each.opname == "FOR_ITER"}
    exits = {offset: offsets[bisect.bisect_left(offsets, end)] for offset, end in ends.items()}
    places: dict[int, _Instruction] = {}
    line = code.co_firstlineno
    for index, each in enumerate(instructions):
        line = (each.positions.lineno if each.positions else None) or line
        place = places[each.offset] = _Instruction(line)
        _note_names(place, instructions, index)
        if each.opname not in ENDS | JUMPS and index + 1 < len(instructions):
            place.nexts.append(instructions[index + 1].offset)
        if each.opcode in (*dis.hasjrel, *dis.hasjabs) and each.offset not in exits:
            place.nexts.append(offsets[bisect.bisect_left(offsets, each.argval)])
        # Assume that an inner loop runs at least once, because it almost always does. Then the variables that the inner
        # loop assigns don't count as carried.
        place.nexts += [exits[later] for later in place.nexts if later in exits and later < each.offset]
    for entry in dis.Bytecode(code).exception_entries:  # type: ignore[attr-defined]
        handler = [each.opname for each in instructions if each.offset >= entry.target][:2]
        if "WITH_EXCEPT_START" not in handler:  # assume that `with` suppresses no error, as few context managers do
            for offset in (each for each in places if entry.start <= each < entry.end):
                places[offset].nexts.append(offsets[bisect.bisect_left(offsets, entry.target)])
    return places


def _note_names(place: _Instruction, instructions: list[dis.Instruction], index: int) -> None:
    each = instructions[index]
    kinds = [part for part in each.opname.split("_") if part in ("LOAD", "STORE", "DELETE")]
    names = each.argval if isinstance(each.argval, tuple) else (each.argval,) * len(kinds)
    if any(part in each.opname for part in LOCAL):
        for kind, name in zip(kinds, names, strict=False):
            if kind != "LOAD":
                place.stores.add(name)
            # an instruction such as STORE_FAST_LOAD_FAST stores the name first, and so doesn't read the old value
            elif name not in place.stores:
                place.reads.add(name)
    elif each.opname in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR") and index:
        before = instructions[index - 1]
        # In `self.best += 1` a copy of `self` stands between loading `self` and the attribute.
        before = instructions[index - 2] if before.opname in ("COPY", "DUP_TOP") and index > 1 else before
        if before.opname.startswith("LOAD_") and any(part in before.opname for part in LOCAL):
            owner = before.argval[-1] if isinstance(before.argval, tuple) else before.argval
            (place.stores if each.opname == "STORE_ATTR" else place.reads).add(f"{owner}.{each.argval}")
