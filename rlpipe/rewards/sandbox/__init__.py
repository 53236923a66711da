"""Runs one Python program that nobody trusts.

`runner` is our side, the rest runs in processes of its own, on the standard library only.
"""
