"""The Messages API of Anthropic, for clients that know no other."""
