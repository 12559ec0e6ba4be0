"""What layers are made of: mixers and FFNs, each with its parameters, its state and its pass."""
