"""The report: a run, or several, as one HTML page that needs no network."""

from holdfast.report.gathering import Gatherer, History
from holdfast.report.page import make_page

__all__ = ["Gatherer", "History", "make_page"]
