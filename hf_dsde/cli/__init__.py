"""The commands of `hf-dsde`, one file each."""
