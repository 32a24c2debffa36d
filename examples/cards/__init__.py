"""A recipe of self-play reinforcement learning on OpenSpiel's two-player games, with a league of past policies."""

from examples.cards.training import cards

__all__ = ["cards"]
