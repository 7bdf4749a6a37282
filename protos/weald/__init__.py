"""Weald: distributed EAGLE-2 speculative decoding. The wire contract lives in `weald.v1`."""

__version__ = "0.1.0"
