"""Files and buckets: atomic writes, tensor files, locks, leases, and disk errors."""
