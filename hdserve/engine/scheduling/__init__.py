"""Which sequences take part in a step, with how many rows and which drafts."""
