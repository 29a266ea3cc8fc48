"""Steps of decoding of whole transformers models on a GPU, each replayed as one CUDA graph."""
