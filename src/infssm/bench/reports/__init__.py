"""Reports, comparisons, tables and figures of finished runs."""
