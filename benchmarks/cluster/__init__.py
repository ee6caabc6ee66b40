"""An emulated cluster on one machine, real training on it, and predictions of its larger sizes from its smallest."""
