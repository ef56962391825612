"""Names that users choose from, each tuple in the order of its enum in `shim/tsg.h`. Loads nothing: `--help` shows them."""

POLICIES = ("lfru", "lru", "slru", "lfu", "fifo")  # enum tsg_policy
ENGINES = ("auto", "host", "device")  # enum tsg_engine_kind
WARM_STARTS = ("off", "on", "both")  # of bench
