"""The compiler: its options and its cache, and how to read the programs that it made."""
