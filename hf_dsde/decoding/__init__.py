"""The round: the loop, what passes between rounds, verification, sampling, endings."""
