"""A person at a terminal: safe text, columns, progress bars, and the exit codes and signals of commands."""

from holdfast.terminal.text import Printable, counted, one_line, printable, printing, spell_s

__all__ = ["Printable", "counted", "one_line", "printable", "printing", "spell_s"]
