"""Custom kernels: one package per operation, each with a reference and the fastest known path per device.

This file is otherwise empty on purpose: transformers imports a package named `kernels` if there is one.
"""
