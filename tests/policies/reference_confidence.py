"""Slow reference of transformers' confidence threshold and its adaptation: Python lists, no tensors, no sklearn.

The rule (transformers 5.17, `AssistedCandidateGenerator.update_candidate_strategy`): collect the probability of every
drafted token up to and including the first mismatch; with more than five of them and both outcomes seen, the new
threshold is the point of the ROC curve with the least `fpr + 3 fnr`.
"""

from __future__ import annotations

import math
from fractions import Fraction


def roc_curve(labels: list[int], scores: list[float]) -> tuple[list[Fraction], list[Fraction], list[float]]:
    """False positive rates, true positive rates and their thresholds, from the strictest to the loosest."""
    positives = sum(labels)
    negatives = len(labels) - positives
    fpr, tpr, thresholds = [Fraction(0)], [Fraction(0)], [math.inf]
    for threshold in sorted(set(scores), reverse=True):
        above = [label for label, score in zip(labels, scores, strict=True) if score >= threshold]
        tpr.append(Fraction(sum(above), positives))
        fpr.append(Fraction(len(above) - sum(above), negatives))
        thresholds.append(threshold)
    return fpr, tpr, thresholds


def best_threshold(labels: list[int], scores: list[float]) -> float:
    """The first threshold, from the strictest, of least cost: exact, so that ties are ties."""
    fpr, tpr, thresholds = roc_curve(labels, scores)
    costs = [f + 3 * (1 - t) for f, t in zip(fpr, tpr, strict=True)]
    return thresholds[costs.index(min(costs))]


class ReferenceRow:
    """One sequence's threshold over its rounds."""

    def __init__(self, threshold: float, history: int) -> None:
        self.threshold = threshold
        self.history = history
        self.scores: list[float] = []
        self.labels: list[int] = []

    def observe(self, scores: list[float], accepted: int) -> None:
        """`scores` are the probabilities of all tokens drafted in the round."""
        self.labels += [1] * accepted
        self.scores += scores[:accepted]
        if accepted < len(scores):
            self.labels.append(0)
            self.scores.append(scores[accepted])
        self.scores, self.labels = self.scores[-self.history :], self.labels[-self.history :]
        if len(self.scores) > 5 and {0, 1} <= set(self.labels):
            self.threshold = best_threshold(self.labels, self.scores)
