"""report.html: one self-contained page made from a folder's rows and its run.json alone.

Nothing is loaded from anywhere: style, script and plots are inside the file, and without its script
the page is still whole. The same numbers feed summary.csv, pairs.csv, table.tex, the page, and the
table on the terminal (`table`). docs/report.md says what stands where.
"""

from kvpolicies.eval.report.page import NAME, write_report
from kvpolicies.eval.report.table import notes, table

__all__ = ["NAME", "notes", "table", "write_report"]
