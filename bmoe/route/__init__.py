"""What a recorded routing tells: views of a trace, cache replay, dropping, prediction, a viewer."""

from bmoe.route.lookups import Lookups, make_lookups
from bmoe.route.outcomes import replay
from bmoe.route.reading import read_trace
from bmoe.route.report import Report, Table
from bmoe.route.trace import RouteTrace

__all__ = [
    "Lookups",
    "Report",
    "RouteTrace",
    "Table",
    "make_lookups",
    "read_trace",
    "replay",
]
