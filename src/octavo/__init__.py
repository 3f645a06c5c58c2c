"""Octavo."""
