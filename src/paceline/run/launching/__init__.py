"""Starting workers, on one machine or on several, and telling which of them failed first."""
