"""The report: a run, or several, as one HTML page that needs no network.

Importing this package imports numpy, which takes a quarter of a second. So import this package only where a report is
made.
"""

from holdfast.looking.report.comparing import make_comparison
from holdfast.looking.report.gathering import Gatherer, History
from holdfast.looking.report.index import make_index, read_rows
from holdfast.looking.report.page import make_page
from holdfast.looking.report.publishing import Publisher

__all__ = ["Gatherer", "History", "Publisher", "make_comparison", "make_index", "make_page", "read_rows"]
