"""Results in, one HTML file out; and the table and the progress that the terminal shows.

Papers are told from the records of `moesaic.ledger` alone, comparisons and explanations from their own.
"""

from moesaic.report.charts import draw, figure_name, to_svg, write_figures
from moesaic.report.comparison import print_comparison, write_comparison_report
from moesaic.report.explanation import write_explanation
from moesaic.report.layer_times import print_layer_times
from moesaic.report.machine import describe_machine
from moesaic.report.markdown import markdown_table
from moesaic.report.page import write_report
from moesaic.report.progress import watch_progress
from moesaic.report.table import print_claims, print_rules
from moesaic.report.theory import print_complexity, print_separation

__all__ = [
    "describe_machine",
    "draw",
    "figure_name",
    "markdown_table",
    "print_claims",
    "print_comparison",
    "print_complexity",
    "print_layer_times",
    "print_rules",
    "print_separation",
    "to_svg",
    "watch_progress",
    "write_comparison_report",
    "write_explanation",
    "write_figures",
    "write_report",
]
