"""HOW it runs: ranks and watchdog, budget and schedule, record log, environment fingerprint, command line."""
