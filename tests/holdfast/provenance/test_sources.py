"""The hash of a source depends on its code, not on its layout or comments."""

import ast
import hashlib
import importlib
import os
import sys
import textwrap
import types
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import RecipeError
from holdfast.provenance.sources import find_listed, hash_source, hash_sources, strip_source
from tests.conftest import ROOT

Write = Callable[[str, str], Path]

SOURCE = '''\
"""A model.   \n
# not a comment
"""
import os  # the system


def build(width=3):   \n
    # explained at length

    text = f"""{width}  # not one either   \n
    {width!r:>{width}}"""  # \u00fcber
    return [width,   # first

            text] if width > 1 \\
        else None
'''

CODE = '''\
"""A model.   \n
# not a comment
"""
import os
def build(width=3):
    text = f"""{width}  # not one either   \n
    {width!r:>{width}}"""
    return [width,
            text] if width > 1 \\
        else None'''


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Return a function that writes a module's source and imports it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write_module(name: str, source: str) -> Path:
        path = tmp_path / (name.replace(".", "/") + ".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
        importlib.invalidate_caches()
        importlib.import_module(name.removesuffix(".__init__"))
        return path

    known = set(sys.modules)
    yield write_module
    for name in set(sys.modules) - known:
        del sys.modules[name]


def test_comments_and_blank_lines_are_removed_and_strings_stay() -> None:
    assert strip_source(SOURCE) == CODE
    assert strip_source(CODE) == CODE


def test_the_hash_never_changes() -> None:
    """It is compared with hashes that other Python versions recorded on other machines."""
    assert hash_source(SOURCE.encode()) == hashlib.sha256(CODE.encode()).hexdigest()
    assert hash_source(SOURCE.encode()) == "8fe36b7afa1b34032f68a64d9a2e01cb1e124c6a94c123f07f61559c5a4814db"


@pytest.mark.parametrize(
    "source",
    [
        SOURCE.replace("\n", "\r\n"),
        SOURCE.replace("\n", "\r"),
        "\ufeff" + SOURCE,
        "# coding: utf-8\n" + SOURCE,
        SOURCE.rstrip(),
        SOURCE + "\n\n# the end",
        SOURCE.replace("    # explained at length\n", "\n\n\t# explained\n  # otherwise\n"),
    ],
)
def test_comments_and_layout_do_not_change_the_hash(source: str) -> None:
    assert hash_source(source.encode()) == hash_source(SOURCE.encode())


def test_every_letter_of_python_identifiers_is_accepted() -> None:
    assert hash_source("\u2118\u00b7 = 1  # why".encode()) == hash_source("\u2118\u00b7 = 1".encode())


def test_another_encoding_does_not_change_the_hash() -> None:
    assert hash_source(b'# coding: latin-1\nx = "\xfc"') == hash_source('x = "\u00fc"'.encode())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("width > 1", "width > 2"),
        ("# not a comment", "# another one"),
        ("# not one either", "# one"),
        ("A model.   ", "A model."),
        ("not a comment\n", "not a comment\n\n"),
        ("import os", "import  os"),
        ("    return", "  return"),
    ],
)
def test_changed_code_changes_the_hash(old: str, new: str) -> None:
    assert old in SOURCE
    assert hash_source(SOURCE.replace(old, new).encode()) != hash_source(SOURCE.encode())


def test_a_blank_line_that_ends_a_statement_counts() -> None:
    ended, continued = "x = 1 \\\n\n-y\n", "x = 1 \\\n-y\n"
    assert ast.dump(ast.parse(ended)) != ast.dump(ast.parse(continued))
    assert hash_source(ended.encode()) != hash_source(continued.encode())
    assert hash_source(b"x = 1 \\\n  # explained\n-y\n") == hash_source(ended.encode())


@pytest.mark.parametrize(
    "data",
    [b"x = (", b'"""', b"x = 'a\n", b"x = 'a\\\nb\n", b"  x\n y", b"\xff", b"x\ny\nz = '\xff'", b"# coding: none\nx"],
)
def test_invalid_python_is_hashed_by_its_bytes(data: bytes) -> None:
    assert hash_source(data) == hashlib.sha256(data).hexdigest()


@given(st.data())
def test_real_code_means_the_same_without_its_comments(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(sorted(ROOT.glob("holdfast/**/*.py")))).read_text()
    code = strip_source(text)
    assert ast.dump(ast.parse(code)) == ast.dump(ast.parse(text))
    lines = text.splitlines(keepends=True)
    before = data.draw(st.sampled_from([node.lineno for node in ast.parse(text).body] or [1])) - 1
    added = data.draw(st.sampled_from(["\n", "   # why\n", "# why\n", " \t \n"]))
    assert strip_source("".join([*lines[:before], added, *lines[before:]])) == code


# ---- modules


def test_modules_are_hashed_by_name(write: Write) -> None:
    write("my_pack.__init__", "pack = 1  # one\n")
    write("my_pack.layers", "layers = 1\n")
    write("my_pack.unused", "unused = 1\n")
    del sys.modules["my_pack.unused"]
    found = hash_sources(["my_pack.layers", "my_pack", "my_pack.layers", "my_pack.unused", "no.such.module"])
    assert found == {
        "my_pack": hashlib.sha256(b"pack = 1").hexdigest(),
        "my_pack.layers": hashlib.sha256(b"layers = 1").hexdigest(),
        "my_pack.unused": hashlib.sha256(b"unused = 1").hexdigest(),
    }
    assert list(found) == ["my_pack", "my_pack.layers", "my_pack.unused"]
    assert "my_pack.unused" not in sys.modules


def test_an_extension_is_hashed_by_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = types.ModuleType("my_compiled")
    compiled.__file__ = str(tmp_path / "my_compiled.so")
    Path(compiled.__file__).write_bytes(b"\x7fELF # not a comment")
    monkeypatch.setitem(sys.modules, "my_compiled", compiled)
    assert hash_sources(["my_compiled"]) == {"my_compiled": hashlib.sha256(b"\x7fELF # not a comment").hexdigest()}


def test_a_module_in_a_zip_file_is_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "my.zip", "w") as archive:
        archive.writestr("my_zipped.py", "x = 1  # one\n")
    monkeypatch.syspath_prepend(str(tmp_path / "my.zip"))
    assert hash_sources(["my_zipped"]) == {"my_zipped": hashlib.sha256(b"x = 1").hexdigest()}


def test_listed_sources_are_modules_files_and_folders(write: Write, tmp_path: Path) -> None:
    write("my_pack.__init__", "")
    for name in ("settings.json", "kernels/a.cu", "kernels/deep/b.h", "kernels/.hidden", "kernels/__pycache__/c.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    modules, files = find_listed(["my_pack", "settings.json", Path("kernels")], tmp_path)
    assert modules == ["my_pack"]
    assert files.keys() == {"settings.json", "kernels/a.cu", "kernels/deep/b.h"}
    elsewhere = tmp_path / "recipes"
    assert find_listed([tmp_path / "settings.json"], elsewhere)[1].keys() == {f"{tmp_path.name}/settings.json"}
    for missing in ("no.such", "kernels/none.h", tmp_path / "none"):
        with pytest.raises(RecipeError, match=f"the recipe's sources: there is no .*'{missing}'"):
            find_listed([missing], tmp_path)


def test_modules_without_source_are_left_out(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = write("my_gone", "x = 1\n")
    gone.unlink()
    (gone.parent / "my_namespace").mkdir()
    importlib.import_module("my_namespace")
    monkeypatch.setitem(sys.modules, "my_none", None)
    assert hash_sources(["my_gone", "my_namespace", "my_none", "sys", ""]) == {}


def test_time_and_place_of_a_file_do_not_change_the_hash(write: Write, tmp_path: Path) -> None:
    path = write("my_model", "def build():\n    return 1\n")
    before = hash_sources(["my_model"])
    os.utime(path, (1, 1))
    assert hash_sources(["my_model"]) == before
    path.rename(tmp_path / "moved.py")
    sys.modules["my_model"].__file__ = str(tmp_path / "moved.py")
    assert hash_sources(["my_model"]) == before
    (tmp_path / "moved.py").write_text(
        textwrap.dedent("""
        # What is built.
        def build():

            return 1
    """)
    )
    assert hash_sources(["my_model"]) == before
    (tmp_path / "moved.py").write_text("def build():\n    return 2\n")
    assert hash_sources(["my_model"]) != before
