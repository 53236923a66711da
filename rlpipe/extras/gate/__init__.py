"""The gate before a promotion: two policies on the same prompts, paired."""
