"""The Triton kernels that `int_matmul` and `lut_matmul` share: products with weights whose codes are packed in rows."""
