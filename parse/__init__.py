"""Turns Kineto files into a Job (columns, matched collectives, aligned clocks, health) and a Job into a Graph."""
