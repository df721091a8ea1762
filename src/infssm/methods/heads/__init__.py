"""One file per head, or per family, and the statistics that fitted heads keep."""
