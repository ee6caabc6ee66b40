"""Turns a program of kernels and collectives per rank into Kineto files like those of a real run."""
