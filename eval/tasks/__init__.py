"""Tasks: where problems come from, how a model is asked, how a text is graded."""
