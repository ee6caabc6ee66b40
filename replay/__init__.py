"""Turns a Graph and durations into a Timeline, its critical path and its breakdown."""
