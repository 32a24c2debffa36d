"""The commands that a reader of the report can copy: reproduce, prove, audit and verify a run."""

import json
import shlex
from collections.abc import Iterator
from typing import Any

from holdfast.extensions.report.gathering import History
from holdfast.extensions.report.markup import Markup, element, section
from holdfast.provenance.changes import find_defaults


def make_commands(history: History) -> Markup:
    """Return the commands that reproduce, prove and audit a run, each with its purpose."""
    run, name = shlex.quote(history.url), f"{_to_name(history.run)}.toml"
    blocks = []
    if history.snapshot is not None:
        blocks.append(_make_block(f"The settings, as {name}", write_toml(history.snapshot.config)))
        again = f"holdfast train {name} --set run={_to_name(history.run)}-again"
        blocks.append(_make_block("Reproduce: train it again, under another name", again))
        blocks.append(
            _make_block("Prove: train its first steps straight, and killed", f"holdfast prove {name} --seed 7")
        )
    if history.newest is not None:
        audit = f"holdfast audit {run} --random 2"
        blocks.append(_make_block("Audit: train committed chunks again, and compare the bytes", audit))
    blocks.append(_make_block("Verify: read every record and checkpoint back", f"holdfast verify {run} --deep"))
    blocks.append(_make_block("Compare the settings and code of its attempts", f"holdfast diff {run}"))
    if history.newest is not None:
        parts = [f"{history.url}/{history.newest.path}/{each.name}" for each in history.newest.files]
        weights = [shlex.quote(each) for each in parts if each.endswith(".safetensors")]
        if len(weights) == 1 and "://" not in history.url:
            text = f"Without Holdfast: this prints {history.newest.checkpoint_sha256}"
            blocks.append(_make_block(text, f"sha256sum {weights[0]}"))
    return section("Reproduce, prove, audit", "commands", *blocks)


def _make_block(text: str, command: str) -> Markup:
    copy = element("button", "copy", type="button", class_="copy", aria_label=f"Copy: {text}")
    code = element("pre", element("code", command), tabindex=0, role="region", aria_label=text)
    return element("div", element("p", text), element("div", code, copy, class_="copied"), class_="command")


def _to_name(run: str) -> str:
    return "".join(letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "-" for letter in run)


def write_toml(config: dict[str, Any]) -> str:
    """Return settings as TOML, without those that have their defaults."""
    return "\n".join(_write_table(config, (), find_defaults())).strip() + "\n"


def _write_table(table: dict[str, Any], path: tuple[str, ...], defaults: dict[str, Any]) -> Iterator[str]:
    written = [
        f"{_write_key(name)} = {_write_value(value)}"
        for name, value in table.items()
        if not isinstance(value, dict) and value is not None and not _is_default(defaults, (*path, name), value)
    ]
    if written and path:
        yield from ("", f"[{'.'.join(map(_write_key, path))}]")
    yield from written
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _write_table(value, (*path, name), defaults)


def _is_default(defaults: dict[str, Any], path: tuple[str, ...], value: Any) -> bool:
    name = ".".join(path)
    default = defaults.get(name)
    return name in defaults and (list(default) if isinstance(default, tuple) else default) == value


def _write_key(key: str) -> str:
    is_bare = key.isascii() and key.replace("-", "").replace("_", "").isalnum()
    return key if is_bare else json.dumps(key, ensure_ascii=False)


def _write_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_write_key(key)} = {_write_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_write_value(each) for each in value if each is not None) + "]"
    return json.dumps(value, ensure_ascii=False)
