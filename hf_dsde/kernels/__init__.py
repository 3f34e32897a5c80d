"""A decode pass of Llama-like models in few kernels, over flat tokens that know their cache row and position.

Importing this package imports no compiler: `hf_dsde.kernels.elementwise` needs Triton and is imported where it is run.
"""
