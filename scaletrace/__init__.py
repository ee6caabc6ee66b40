"""Turns a folder of Kineto traces into one replayable dependency graph, and stretches it to larger clusters."""

__version__ = "0.1.0"
