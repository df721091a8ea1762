"""The paper's analyses: each a function that returns data and a figure."""
