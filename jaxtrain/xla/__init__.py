"""The compiler: its options, the platform it compiles for, and how to read what it made."""
