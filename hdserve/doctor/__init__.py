"""What ``hdserve doctor`` looks at: each check finds things, and says how to mend what is wrong.

The checks run the code that serving runs where they can, so that they fail for its reasons.
"""
