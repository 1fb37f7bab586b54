"""Tasks, grading, studies, statistics and reports, and the embedded model they run on."""
