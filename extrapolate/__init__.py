"""Rewrites a Graph for another layout and cluster and sweeps such rewrites into a ScalingCurve."""
