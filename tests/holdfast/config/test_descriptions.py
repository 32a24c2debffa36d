"""Tests of the descriptions of settings: docstrings under the fields, in the page, in Prefect's form and in editors."""

from typing import Any

import pytest
from pydantic import BaseModel

from holdfast.config import RunConfig, Section
from holdfast.config.descriptions import describe_fields
from tests.support.pages import find_section, list_sections


class Described(Section):
    """A section."""

    width: int = 1
    """The width of a layer.

    It has "quotes".
    """
    depth: int
    count: int = 2
    """How many."""


def test_the_docstring_under_a_field_is_its_description() -> None:
    assert describe_fields(Described) == {"width": 'The width of a layer. It has "quotes".', "count": "How many."}


def test_the_schema_has_them() -> None:
    properties = Described.model_json_schema()["properties"]
    assert {name: field.get("description") for name, field in properties.items()} == {
        "width": 'The width of a layer. It has "quotes".', "depth": None, "count": "How many.",
    }  # fmt: skip


def test_every_setting_has_one_and_the_form_shows_it() -> None:
    schema = RunConfig.model_json_schema()
    for _, prefix, section in [("", "", RunConfig), *list_sections(RunConfig)]:
        own: dict[str, Any] = schema if section is RunConfig else schema["$defs"][section.__name__]
        for name, field in section.model_fields.items():
            if not find_section(field):
                described = describe_fields(section)[name]
                assert described == own["properties"][name]["description"], prefix + name
                assert field.description is None, f"{prefix}{name} has two descriptions"


def test_without_its_source_a_class_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an installation of compiled files alone."""
    unread = type("Unread", (BaseModel,), {"__module__": "no_such_module"})
    assert describe_fields(unread) == {}
