"""One script per figure of docs/results.md."""
