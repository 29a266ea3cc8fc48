"""Scales and rotations that are folded into weights: where they may go, the pass that moves them, and its checks."""
