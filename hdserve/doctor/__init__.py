"""What ``hdserve doctor`` checks: each check reports findings, and how to fix what is wrong.

Where possible the checks run the code that serving runs, so that they fail for the same reasons.
"""
