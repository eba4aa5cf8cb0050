"""Guards of memory while training: limits, host memory, ledger, recovery, rollback and snapshots."""
