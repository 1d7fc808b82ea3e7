"""Files and buckets: atomic writes, the cache, tensor files, locks, leases, and disk errors.

`cache.py` makes folders of the cache once, also from a bucket (`bucket_folders.py`); `record.py` is
the record that it trusts.
"""
