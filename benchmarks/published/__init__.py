"""Measurements that other people published, of training steps on real GPUs, rebuilt and predicted."""
