"""Seeds that `misbehave.py` knows (that file is a patch and cannot be imported without its effect)."""

HANG, ONE_RAISES, EXITS, KILLED, REFUSES, ONE_REFUSES, SLIP, NATIVE, LATE_REFUSAL, CHATTY, INVALID = range(101, 112)
DIES_SAVING = 112
SKIPS, SWAPS, SIZES, KINDS, STOPS, PYTHON_LOOP, C_LOOP, FREE_C_LOOP, DEADLOCK, LEAVES, SKIPS_ONE = range(113, 124)
DAEMON = 124
