"""What a segment means: steps, losses, taps, and the oracle itself."""
