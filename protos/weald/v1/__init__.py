"""The wire contract: the protos, and the code generated from them by `scripts/protos`."""
