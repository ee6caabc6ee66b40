"""Draws a Timeline or a ScalingCurve: Perfetto protobuf, HTML, plots, terminal text."""
