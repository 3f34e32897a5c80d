"""A decode pass of Llama-like models in few kernels, over flat tokens that know their cache row and position.

Importing this package imports no compiler: `hf_dsde.fused.kernels` needs Triton and is imported by whoever runs it.
"""
