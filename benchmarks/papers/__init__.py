"""Turns two papers on scaling into what this project says of the same questions."""
