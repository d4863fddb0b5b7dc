"""What the README claims, measured: one file per claim; `make bench` runs them all and prints one table."""
