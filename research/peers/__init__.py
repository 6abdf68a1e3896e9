"""The program beside its peers, on the same bytes: `make bench-peers`."""
