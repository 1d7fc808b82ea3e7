"""Runs of several processes: rendezvous, agreement, liveness monitoring, and a common stop."""
