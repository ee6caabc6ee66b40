"""Small real training jobs: what the shipped samples and the collector's tests record."""
