"""Commands at a terminal: safe text, columns, progress bars, exit codes and signals."""

from holdfast.terminal.text import Printable, counted, one_line, printable, printing, spell_s, stamp

__all__ = ["Printable", "counted", "one_line", "printable", "printing", "spell_s", "stamp"]
