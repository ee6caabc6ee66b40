"""Records a running distributed PyTorch job as a capture: one Kineto file a rank, sidecars, a manifest."""
