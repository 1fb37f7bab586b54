"""Tasks, grading, studies, statistics and reports."""
