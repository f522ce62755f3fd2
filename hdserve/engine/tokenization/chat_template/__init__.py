"""What a chat template takes and shows, found out by rendering."""
