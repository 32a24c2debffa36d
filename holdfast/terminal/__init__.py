"""Text for a person at a terminal: safe, in columns, and with progress bars."""

from holdfast.terminal.text import Printable, counted, one_line, printable, printing, spell_s

__all__ = ["Printable", "counted", "one_line", "printable", "printing", "spell_s"]
