"""The revisions, oldest first by their numbers. One that was released is never changed."""
