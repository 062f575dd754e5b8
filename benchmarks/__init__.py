"""asv benchmarks: one file a question. Lower is better throughout; measuring is done by `ci.supervisor`."""
