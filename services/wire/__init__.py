"""Where protobuf meets the plain values of `services.types`: messages, errors, both ends of a connection."""
