"""Files that appear whole, tensors in files, locks, addresses, and what a disk's errors mean."""
