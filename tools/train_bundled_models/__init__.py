"""Train the small models that ship with hdserve, from a corpus file to an exported directory.

    corpus -> tokenizer -> packing -> training -> export -> evaluation, samples -> card

The README beside this file has the commands.
"""
