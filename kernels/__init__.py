"""Custom kernels: one package per operation, each with a reference and the fastest known path per device.

This file holds nothing else on purpose: transformers imports a package named `kernels` when there is one.
"""
