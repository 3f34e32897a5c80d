"""What is counted and timed, and how it is shown."""
