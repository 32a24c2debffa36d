"""The tables of FORMAT.md: what signatures cover, and what finds a damaged file."""

from tests.support.struck_records import FORMAT, fill_format


def test_the_tables_of_the_format_are_what_the_code_computes() -> None:
    text = FORMAT.read_text("utf-8")
    assert fill_format(text) == text, "make docs writes them again"
