"""What results are shown with: tables, sizes, safe text, figures."""
