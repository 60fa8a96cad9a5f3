"""Evaluation: what a trained model remembers, predicts and costs."""

from zoo.evaluation.run import evaluate

__all__ = ["evaluate"]
