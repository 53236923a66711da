"""SFT and RL of language models as a workflow that loses nothing."""

__version__ = "0.1.0"
