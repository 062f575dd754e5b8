"""Exit codes of every command."""

OK, FAILED, USAGE, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143
