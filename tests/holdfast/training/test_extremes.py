"""A field of the configuration with an extreme value gives one clear error that names it, or works."""

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import app, run_app
from holdfast.config import RunConfig, Section, load_config
from holdfast.errors import ConfigError, HoldfastError
from holdfast.journal import Journal
from holdfast.journal.signature import load_signing_key, load_trusted_key
from holdfast.keeping import retention
from holdfast.machine.preemption import find_sources
from holdfast.provenance.fingerprint import fingerprint
from holdfast.store import open_store
from tests.support.makers import make_line, train

LONG = "x" * 5000
EXTREMES: list[Any] = [
    1e308, -1e308, math.nan, math.inf, -math.inf, -0.0, 5e-324, 2**63, -(2**63), 2**53, 10**30, 0, -1, True,
    "", " ", LONG, "\0", "a\0b", "\n", "..", "/", "/dev/zero", "/dev/null", "/etc", "~", "%s{}", "\x1b[31m", "é" * 99,
    "http://", "http://[", "http://a b", "file:///etc/passwd", "s3://", "s3://\0", "no-such-scheme://x",
    [], ["\0"], [LONG], ["/dev/zero"], [[]], [math.nan], {}, {"\0": 1}, {"a": {"a": math.inf}},
]  # fmt: skip
# Values that only a shell can pass: bytes that are not UTF-8, and text that is not TOML.
FROM_A_SHELL = ["\udcff", "'", "[" * 5000, "9" * 5000, "1979-05-27", "", "=", "[1,", "nan", "{a=1}", '"""', "\x00"]


def fields(section: type[Section] = RunConfig, table: str = "") -> Iterator[str]:
    """Yield every field by its dotted name, including those of optional tables."""
    for name, field in section.model_fields.items():
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        tables = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
        yield f"{table}{name}"
        for kind in tables:
            yield from fields(kind, f"{table}{name}.")


def to_toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(key)} = {to_toml(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(to_toml, value))}]"
    return json.dumps(value) if isinstance(value, str | bool) else repr(value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a configuration, and a store with its run."""
    folder = tmp_path_factory.mktemp("extremes")
    line = make_line(open_store(str(folder / "runs")), "a")
    train(line)
    train(line)
    (folder / "base.toml").write_text(f'recipe = "tests.support.toy:toy"\nrun = "a"\nstore = "{folder}/runs"\n')
    return folder


def write_toml(folder: Path, name: str, value: Any) -> Path:
    """Write a configuration with one more field, and return its path."""
    lines = [line for line in (folder / "base.toml").read_text().splitlines() if not line.startswith(f"{name} ")]
    required = {"init_from": 'run = "a"', "retention.keep_best": 'metric = "avg_loss"'}
    table, _, key = name.rpartition(".")
    others = [required[table]] if table in required and not required[table].startswith(f"{key} ") else []
    path = folder / "changed.toml"
    if table:
        path.write_text("\n".join([*lines, f"[{table}]", *others, f"{key} = {to_toml(value)}", ""]))
    else:
        path.write_text("\n".join([f"{key} = {to_toml(value)}", *lines, ""]))
    return path


def read(path: Path, *overrides: str) -> tuple[RunConfig | None, str]:
    """Return the configuration, or check that one clear line refuses it."""
    try:
        return load_config(path, overrides), ""
    except ConfigError as error:
        refusal = str(error)
    assert len(refusal) < 1000
    assert "Traceback" not in refusal
    return None, refusal


def use(config: RunConfig, journal: Journal) -> None:
    """Do everything with a configuration that happens before or without a rank."""
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    assert RunConfig.model_validate(json.loads(json.dumps(config.model_dump(mode="json")))) == config
    fingerprint(config.identity)
    assert 0 < config.next_stop(0, 10, 7) <= 10 * config.epochs
    with contextlib.suppress(ConfigError):  # a metric that no commit has
        retention.prune_by_policy(journal, config.retention, 10, dry_run=True)
    for source in find_sources(config.resume.drain_file):
        with contextlib.suppress(OSError, ValueError):  # these are reported once
            source()
    for load, sources in (
        (load_signing_key, [config.signing_key] if config.signing_key else []),
        (load_trusted_key, list(config.resume.trusted_keys)),
    ):
        for source_name in sources:
            with pytest.raises(ConfigError):
                load(source_name)


def assert_read_only_commands(path: Path, journal: Journal, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["plan", str(path)], ["diff", f"{journal.store_url}/{journal.run}", str(path)]):
        assert run_app(app, command) in (0, 1, 2, 3), command
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err + shown.out


@pytest.mark.parametrize("name", sorted(set(fields())))
def test_an_extreme_is_refused_by_name_or_works(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = Journal(open_store(str(folder / "runs")), "a")
    for value in EXTREMES:
        path = write_toml(folder, name, value)
        config, refusal = read(path)
        if config is None:
            assert name.partition(".")[0] in refusal, (name, value)
            continue
        use(config, journal)
        if name != "recipe":
            assert_read_only_commands(path, journal, capsys)


@pytest.mark.parametrize("name", sorted(set(fields())))
def test_extreme_text_from_a_shell_is_refused_by_name_or_works(name: str, folder: Path) -> None:
    journal = Journal(open_store(str(folder / "runs")), "a")
    for text in [*FROM_A_SHELL, *(to_toml(value) for value in EXTREMES)]:
        config, refusal = read(folder / "base.toml", f"{name}={text}")
        if config is None:
            assert name.partition(".")[0] in refusal, (name, text)
        else:
            use(config, journal)


@pytest.mark.parametrize("path", ["/dev/zero", "/", "\0", "\udcff", "x" * 5000, "", "/dev/null"])
def test_a_configuration_path_that_is_not_a_file_is_refused(path: str) -> None:
    with pytest.raises(HoldfastError):
        load_config(path)


@pytest.mark.parametrize("text", ["[" * 100_000, "a = " + "[" * 5000, "a = " + "9" * 5000, "\xff", "a = 1\0"])
def test_a_file_that_is_not_toml_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError):
        load_config(path)


def test_settings_that_do_not_fit_the_environment_of_a_rank_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="at most 100000 are allowed"):
        load_config(folder / "base.toml", [f'settings.text="{"x" * 200_000}"'])


def test_settings_keep_finite_numbers_and_refuse_others(folder: Path) -> None:
    config = load_config(folder / "base.toml", ["settings.a=1e308", "settings.b=123456789012345678901234567890"])
    assert RunConfig.model_validate_json(config.model_dump_json()).settings == config.settings
    with pytest.raises(ConfigError, match=r"settings\.c\.1: expected a finite number"):
        load_config(folder / "base.toml", ["settings.c=[1, nan]"])
