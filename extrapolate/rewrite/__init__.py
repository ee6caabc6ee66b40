"""Rewrites a Graph along one parallel axis a module: Graph in, Graph out."""
