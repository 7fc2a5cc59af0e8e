"""Linear attention: states that decay, delta rules and their chunks, for training and for decoding."""
