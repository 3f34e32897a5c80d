"""Offline batch inference: a whole data set through one pair of models, no row of the batch idle."""
