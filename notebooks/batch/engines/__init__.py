"""Engines, which execute runs: `engine` defines their interface, and each other module holds one engine."""
