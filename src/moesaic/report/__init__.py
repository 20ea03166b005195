"""Results in; figures, terminal tables and self-contained HTML pages out."""

from moesaic.report.chart_drawing import draw, figure_name, to_svg, write_figures
from moesaic.report.comparison_report import print_comparison, write_comparison_report
from moesaic.report.explanation_page import write_explanation
from moesaic.report.layer_benchmark_table import print_layer_times
from moesaic.report.machine_info import describe_machine
from moesaic.report.progress_bars import watch_progress
from moesaic.report.training_page import write_training_page

__all__ = [
    "describe_machine",
    "draw",
    "figure_name",
    "print_comparison",
    "print_layer_times",
    "to_svg",
    "watch_progress",
    "write_comparison_report",
    "write_explanation",
    "write_figures",
    "write_training_page",
]
