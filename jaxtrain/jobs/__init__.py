"""Makes things once: a resumable map with one record of what is complete; processes or Ray."""
