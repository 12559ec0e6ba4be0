"""Runs a verified bundle: needs only the IREE runtime, NumPy and tokenizers."""
