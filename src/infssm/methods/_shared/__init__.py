"""What several methods are built from: losses, replay, importances, passes over data, sums over processes."""
