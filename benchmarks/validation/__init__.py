"""Turns published measurements into fits, predictions and verdicts, without letting a fit see what it predicts."""
