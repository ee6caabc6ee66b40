"""What rides into each worker: a sitecustomize that turns the import of torch's optimizers into step boundaries."""
