"""Captures a step, searches for a plan, and confirms it."""
